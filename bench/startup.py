"""From starting the processes to the first token: once with nothing compiled, then with all of it.

    python -m bench.startup --shape qwen3-0.6b --json startup.json

Scheduler and worker start together on a checkpoint of random weights; a client asks for one token
as soon as the scheduler is ready. Kernels are cached in a folder of this run's own, so that the
first start is a cold one. The checkpoint's pages are in the system's cache both times.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench import checkpoints
from bench.throughput import Request, drive, environment, serving


def measure(model: Path, worker_options: Sequence[str]) -> float:
    """Seconds until the first token of a fresh start."""
    started_s = time.perf_counter()
    with serving(model, worker_options, ()) as address:
        asyncio.run(drive(address, [Request(list(range(100, 164)), 1)], 0.0, "first"))
        return time.perf_counter() - started_s


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.startup", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--shape", choices=checkpoints.SHAPES, default="qwen3-0.6b")
    parser.add_argument("--warm-starts", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write results and environment here")
    parser.add_argument("--worker", nargs=argparse.REMAINDER, default=[], help="worker options")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="pagewire-bench-") as folder:
        os.environ["TRITON_CACHE_DIR"] = str(Path(folder) / "kernels")  # for the processes to come
        (Path(folder) / "model").mkdir()
        model = checkpoints.write(Path(folder) / "model", options.shape)
        seconds = []
        for index in range(1 + options.warm_starts):
            seconds.append(round(measure(model, options.worker), 1))
            print(f"{'warm' if index else 'cold'} start to first token: {seconds[-1]:.1f} s")
    if options.json is not None:
        results = {"shape": options.shape, "cold_s": seconds[0], "warm_s": seconds[1:]}
        options.json.write_text(json.dumps({"environment": environment(), **results}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
