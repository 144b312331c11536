"""Measures the scheduler's core: microseconds of one thread, without worker and wire.

    python -m bench.scheduler_core [--steps 400] [--json results.jsonl]

A step is `schedule` and `update`, one step ahead, with the prefix cache on. In the steady decode
one running request in sixteen fills a KV block at every step, and takes a new one.
"""

import gc
import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np

from bench.harness.records import new_parser
from scheduler_svc.core import Request, Scheduler, SchedulerConfig, StepPlan, StepResult
from scheduler_svc.core.kv.block_pool import BlockPool

BLOCK_SIZE = 16
VOCAB_SIZE = 150_000
EOS = 1  # never sampled here


@dataclass(frozen=True, slots=True)
class Measured:
    """One line of the table: microseconds of one call."""

    what: str
    median_us: float
    p99_us: float


def make_request(number: int, num_tokens: int) -> Request:
    """A prompt that shares no block with any other."""
    prompt = np.full(num_tokens, 2 + number % 100_000, dtype=np.int32)
    return Request(f"r{number}", prompt, handle=number)


def make_scheduler(num_running: int, context: int, num_waiting: int) -> Scheduler:
    """A busy scheduler: the running requests decode, the others wait."""
    max_len = context + 4096
    config = SchedulerConfig(
        num_blocks=num_running * (-(-max_len // BLOCK_SIZE) + 1) + 1,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_running,
        max_num_batched_tokens=max(num_running * 64, 65_536),
        max_model_len=max_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
    )
    scheduler = Scheduler(config)
    for number in range(num_running):
        scheduler.add(make_request(number, context - number % BLOCK_SIZE))
    while scheduler.num_waiting or has_prefill(scheduler):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.update(answer(plan))
    for number in range(num_waiting):
        scheduler.add(make_request(num_running + number, 64))
    return scheduler


def has_prefill(scheduler: Scheduler) -> bool:
    """True if a request has more than one token to compute."""
    view, slots = scheduler.view, scheduler.view.running_slots()
    return bool((view.num_planned[slots] - view.num_computed[slots] > 1).any())


def answer(plan: StepPlan) -> StepResult:
    """A worker's answer; tokens vary, so that no two blocks are equal."""
    num_rows = len(plan.sampled_slots)
    first = 2 + plan.step_id * 7919 % 100_000
    return StepResult(plan.step_id, np.arange(first, first + num_rows, dtype=np.int32))


def timed(call: Callable[[], object]) -> float:
    """Microseconds of one call."""
    before = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - before) / 1e3


def summarize(what: str, samples: list[float]) -> Measured:
    """Median and tail of the samples."""
    return Measured(what, float(np.median(samples)), float(np.percentile(samples, 99)))


def decode_steps(num_running: int, context: int, num_waiting: int, num_steps: int) -> Measured:
    """Steady decode, one step ahead of the results."""
    scheduler = make_scheduler(num_running, context, num_waiting)
    ahead = scheduler.schedule()
    samples = []
    for _ in range(num_steps):
        assert ahead is not None
        result = answer(ahead)
        before = time.perf_counter_ns()
        ahead = scheduler.schedule()
        scheduler.update(result)
        samples.append((time.perf_counter_ns() - before) / 1e3)
    what = f"step, {num_running} running, context {context}, {num_waiting} waiting"
    return summarize(what, samples)


def admission(num_tokens: int, num_steps: int) -> Iterator[Measured]:
    """A long prompt, uncached and then fully cached."""
    scheduler = make_scheduler(2, num_tokens, 0)
    cold: list[float] = []
    warm: list[float] = []

    def admit(number: int) -> None:
        scheduler.add(make_request(number, num_tokens))
        assert scheduler.schedule() is not None

    scheduler.abort("r0")
    for number in range(1000, 1000 + num_steps):
        for samples in (cold, warm):
            samples.append(timed(lambda number=number: admit(number)))  # type: ignore[misc]
            scheduler.abort(f"r{number}")
            while scheduler.num_in_flight:
                plan = scheduler.oldest_in_flight
                assert plan is not None
                scheduler.update(answer(plan))
    yield summarize(f"add and admit {num_tokens} tokens, nothing cached", cold)
    yield summarize(f"add and admit {num_tokens} tokens, all cached", warm)


def pool_calls(num_blocks: int, num_steps: int) -> Iterator[Measured]:
    """Takes one block of a million and returns it, at any position of the free queue."""
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    rng = np.random.default_rng(0)
    chosen = rng.integers(1, num_blocks, size=num_steps).tolist()
    hits = [timed(lambda block=block: pool.share([block])) for block in chosen]  # type: ignore[misc]
    releases = [timed(lambda block=block: pool.release([block])) for block in chosen]  # type: ignore[misc]
    yield summarize(f"hit a free block among {num_blocks}", hits)
    yield summarize(f"release a block among {num_blocks}", releases)


def run_all(num_steps: int) -> Iterator[Measured]:
    """Every measurement, as soon as it is made."""
    for num_running in (64, 256, 1024, 4096):
        yield decode_steps(num_running, 100, 10, num_steps)
    yield decode_steps(64, 100_000, 10, num_steps)
    yield decode_steps(64, 100, 100_000, num_steps)
    yield from admission(32_768, max(num_steps // 20, 5))
    yield from pool_calls(1_000_000, max(num_steps, 1000))


def commit() -> str:
    """The measured revision, marked if the tree differs from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def cpu_name() -> str:
    """The processor's name in the system."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":")[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    parser = new_parser("bench.scheduler_core", __doc__)
    parser.add_argument("--steps", type=int, default=400, help="samples per line (default 400)")
    parser.add_argument("--json", metavar="FILE", help="append one JSON object per line to FILE")
    args = parser.parse_args()
    machine = {
        "cpu": cpu_name(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "commit": commit(),
    }
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print(f"{'':58}{'median us':>12}{'p99 us':>12}")
    for measured in run_all(args.steps):
        gc.collect()
        print(f"{measured.what:58}{measured.median_us:12.1f}{measured.p99_us:12.1f}", flush=True)
        if args.json:
            with open(args.json, "a", encoding="utf-8") as lines:
                lines.write(json.dumps(machine | asdict(measured)) + "\n")


if __name__ == "__main__":
    main()
