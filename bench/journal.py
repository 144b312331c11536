"""Costs of recording: microseconds of the scheduler's and the recorder's thread, bytes per step.

    python -m bench.journal [--steps 2000] [--json results.jsonl]

A step is the shell's calls of the core: set the time twice, plan, apply. Between steps there are
two milliseconds, as with a worker; in these the recorder writes.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from bench.scheduler_core import BLOCK_SIZE, EOS, VOCAB_SIZE, answer, make_request
from pagewire.v1 import worker_pb2
from scheduler_svc.core import Request, Scheduler, SchedulerConfig
from scheduler_svc.journal import segments
from scheduler_svc.journal.options import RecordOptions
from scheduler_svc.journal.recorder import SWITCH_INTERVAL_S
from scheduler_svc.journal.start import make_core
from scheduler_svc.sampling import Sampling

CONTEXT = 512
STEP_S = 0.002


@dataclass(frozen=True, slots=True)
class Cost:
    """Costs of one step."""

    mode: str
    num_running: int
    median_us: float  # of the scheduler's thread, including waits for the interpreter
    p99_us: float
    recorder_us: float  # CPU of all other threads
    size_bytes: float


def make_config(num_running: int, num_steps: int) -> SchedulerConfig:
    """Limits with room for all requests."""
    max_len = CONTEXT + num_steps + 1024
    return SchedulerConfig(
        num_blocks=num_running * (-(-max_len // BLOCK_SIZE) + 1) + 1,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_running,
        max_num_batched_tokens=65_536,
        max_model_len=max_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
    )


def measure(mode: str, num_running: int, num_steps: int) -> Cost:
    """Steady decode; `mode` is off, replace or keep."""
    with tempfile.TemporaryDirectory() as folder:
        options = None if mode == "off" else RecordOptions(Path(folder), 1024, mode == "keep")
        config = make_config(num_running, num_steps)
        made = make_core(config, worker_pb2.WorkerDescription(), "bench", options)
        fill(made.core, num_running)
        before_s, own_s = time.process_time(), time.thread_time()
        size_bytes = sum(map(segments.size_bytes, segments.recordings(Path(folder))))
        samples = [step(made.core) for _ in range(num_steps)]
        own_s = time.thread_time() - own_s
        if made.recorder is not None:
            made.recorder.close()
            assert not made.recorder.why_stopped, made.recorder.why_stopped
        others_s = time.process_time() - before_s - own_s
        size_bytes = sum(map(segments.size_bytes, segments.recordings(Path(folder)))) - size_bytes
    return Cost(
        mode,
        num_running,
        float(np.median(samples)),
        float(np.percentile(samples, 99)),
        others_s / num_steps * 1e6,
        size_bytes / num_steps,
    )


def fill(core: Scheduler, num_running: int) -> None:
    """Computes every prompt and plans a step ahead."""
    for number in range(num_running):
        core.add(sampled(number))
    for _ in range(2 + num_running * CONTEXT // 65_536):
        plan = core.schedule()
        assert plan is not None
        core.update(answer(plan))
    assert core.schedule() is not None
    time.sleep(0.2)  # the recorder has written the prompts


def sampled(number: int) -> Request:
    """A request with sampling parameters, as real ones have."""
    request = make_request(number, CONTEXT - number % BLOCK_SIZE)
    return replace(request, sampling=Sampling(0.0, 1.0, 0, 0.0, seed=number))


def step(core: Scheduler) -> float:
    """Microseconds of one step."""
    time.sleep(STEP_S)
    oldest = core.oldest_in_flight
    assert oldest is not None
    result = answer(oldest)
    before = time.perf_counter_ns()
    core.expire(time.monotonic())
    core.schedule()
    core.expire(time.monotonic())
    core.update(result)
    return (time.perf_counter_ns() - before) / 1e3


def main() -> None:
    """Prints a table, and with --json appends a line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--json", type=Path, help="append the results to this file")
    options = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as the scheduler's process does
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    processor = platform.processor() or platform.machine()
    print(f"{processor}, Python {platform.python_version()}, commit {commit}")
    print("recording  running  median us   p99 us  recorder us   bytes")
    for num_running in options.running:
        for mode in ("off", "keep", "replace"):
            cost = measure(mode, num_running, options.steps)
            print(
                f"{cost.mode:<9}{cost.num_running:>9}{cost.median_us:>11.0f}{cost.p99_us:>9.0f}"
                f"{cost.recorder_us:>13.0f}{cost.size_bytes:>8.0f}",
                flush=True,
            )
            if options.json is not None:
                with options.json.open("a") as file:
                    file.write(json.dumps({**asdict(cost), "commit": commit}) + "\n")


if __name__ == "__main__":
    main()
