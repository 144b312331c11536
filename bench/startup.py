"""From starting the processes to the first token: once with nothing compiled, then with all of it.

    python -m bench.startup --shape qwen3-0.6b --json startup.jsonl

Scheduler and worker start together on a checkpoint of random weights; a client asks for one token
as soon as the scheduler is ready. Kernels are cached in a folder of this run's own, so that the
first start is a cold one. The checkpoint's pages are in the system's cache both times.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench import checkpoints
from bench.client import drive
from bench.deployment import serving
from bench.records import add_json, writer
from bench.workloads import Request


def measure(model: Path, worker_options: Sequence[str]) -> float:
    """Seconds until the first token of a fresh start."""
    started_s = time.perf_counter()
    with serving(model, worker_options, ()) as served:
        asyncio.run(drive(served.scheduler, [Request(list(range(100, 164)), 1)], 0.0, "first"))
        return time.perf_counter() - started_s


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.startup", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--shape", choices=checkpoints.SHAPES, default="qwen3-0.6b")
    parser.add_argument("--warm-starts", type=int, default=2)
    add_json(parser)
    parser.add_argument("--worker", nargs=argparse.REMAINDER, default=[], help="worker options")
    options = parser.parse_args(arguments)
    emit = writer(options.json, ["python", "-m", "bench.startup", *arguments])
    with (
        checkpoints.temporary(options.shape) as model,
        tempfile.TemporaryDirectory(prefix="pagewire-bench-") as kernels,
    ):
        os.environ["TRITON_CACHE_DIR"] = kernels  # for the processes to come
        seconds = []
        for index in range(1 + options.warm_starts):
            seconds.append(round(measure(model, options.worker), 1))
            print(f"{'warm' if index else 'cold'} start to first token: {seconds[-1]:.1f} s")
    emit("startup", {"shape": options.shape, "cold_s": seconds[0], "warm_s": seconds[1:]})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
