"""Time from starting the processes to the first token: with cold, then with warm kernel caches.

    python -m bench.startup --shape qwen3-0.6b --json startup.jsonl

Scheduler and worker start together on a checkpoint of random weights; a client asks for one token
as soon as the scheduler is ready. Kernels are cached in a folder of this run's own, so that the
first start is a cold one. The checkpoint's pages are in the system's cache both times. Below each
start stands where the worker's part of it went, in milliseconds, as its log has it.
"""

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.harness import checkpoints
from bench.harness.client import drive
from bench.harness.deployment import serving
from bench.harness.records import Results, add_json, new_parser
from bench.harness.workloads import WorkloadRequest


@dataclass(frozen=True, slots=True)
class FreshStart:
    """One start of the processes."""

    seconds: float  # until the first token
    phases: str  # the worker's times per phase


def measure(model: Path, worker_options: Sequence[str]) -> FreshStart:
    """Starts both processes, requests one token and stops them."""
    started_s = time.perf_counter()
    with serving(model, worker_options, ()) as served:
        asyncio.run(
            drive(served.scheduler, [WorkloadRequest(list(range(100, 164)), 1)], 0.0, "first")
        )
        seconds = round(time.perf_counter() - started_s, 1)
        _, _, phases = served.worker_log.read_text().partition("ready after ")
        return FreshStart(seconds, phases.partition("\n")[0])


def main(arguments: Sequence[str]) -> int:
    parser = new_parser("bench.startup", __doc__)
    parser.add_argument("--shape", choices=checkpoints.SHAPES, default="qwen3-0.6b")
    parser.add_argument("--model", type=Path, help="a folder with the shape's checkpoint")
    add = parser.add_argument
    add("--kernels", type=Path, help="an empty folder to keep compiled kernels in (default: none)")
    parser.add_argument("--warm-starts", type=int, default=2)
    add_json(parser)
    parser.add_argument("--worker", nargs=argparse.REMAINDER, default=[], help="worker options")
    options = parser.parse_args(arguments)
    results = Results(options.json, ["python", "-m", "bench.startup", *arguments])
    with contextlib.ExitStack() as on:
        model = options.model or on.enter_context(checkpoints.temporary(options.shape))
        kernels = options.kernels or on.enter_context(tempfile.TemporaryDirectory())
        if any(Path(kernels).iterdir()):
            parser.error(f"--kernels: {kernels} is not empty, so no start would be cold")
        os.environ["TRITON_CACHE_DIR"] = str(kernels)  # for the started processes
        starts = []
        for index in range(1 + options.warm_starts):
            start = measure(model, options.worker)
            kind = "warm" if index else "cold"
            results.say(f"{kind} start to first token: {start.seconds:.1f} s")
            results.say(f"  of the worker: {start.phases}")
            starts.append(start)
    cold, *warm = starts
    seconds = {"cold_s": cold.seconds, "warm_s": [start.seconds for start in warm]}
    phases = {"cold_phases": cold.phases, "warm_phases": [start.phases for start in warm]}
    results.add("startup", {"shape": options.shape, **seconds, **phases})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
