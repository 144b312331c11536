"""From starting the processes to the first token: once with nothing compiled, then with all of it.

    python -m bench.startup --shape qwen3-0.6b --json startup.jsonl

Scheduler and worker start together on a checkpoint of random weights; a client asks for one token
as soon as the scheduler is ready. Kernels are cached in a folder of this run's own, so that the
first start is a cold one. The checkpoint's pages are in the system's cache both times. Below each
start stands where the worker's part of it went, in milliseconds, as its log has it.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import checkpoints
from bench.client import drive
from bench.deployment import serving
from bench.records import add_json, writer
from bench.workloads import Request


@dataclass(frozen=True, slots=True)
class Start:
    """One fresh start."""

    seconds: float  # until the first token
    phases: str  # where the worker says that its part went


def measure(model: Path, worker_options: Sequence[str]) -> Start:
    """Starts both, asks for a token and stops them."""
    started_s = time.perf_counter()
    with serving(model, worker_options, ()) as served:
        asyncio.run(drive(served.scheduler, [Request(list(range(100, 164)), 1)], 0.0, "first"))
        seconds = round(time.perf_counter() - started_s, 1)
        _, _, phases = served.worker_log.read_text().partition("ready after ")
        return Start(seconds, phases.partition("\n")[0])


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
        starts = []
        for index in range(1 + options.warm_starts):
            start = measure(model, options.worker)
            print(f"{'warm' if index else 'cold'} start to first token: {start.seconds:.1f} s")
            print(f"  of the worker: {start.phases}", flush=True)
            starts.append(start)
    cold, *warm = starts
    seconds = {"cold_s": cold.seconds, "warm_s": [start.seconds for start in warm]}
    phases = {"cold_phases": cold.phases, "warm_phases": [start.phases for start in warm]}
    emit("startup", {"shape": options.shape, **seconds, **phases})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
