"""Scheduler and worker as processes, driven over gRPC: tokens in, tokens out, whole run timed.

    python -m bench.throughput --shape qwen3-0.6b --repeat 3 --steps 1 8 32 128 256 --prefill 16

The workload is the one other small engines publish: 256 requests, prompts and outputs uniform in
100..1024 from Python's generator with seed 0, all submitted at once, 133,966 output tokens.
`--steps` adds the time of one decode step by batch, as the client sees it, at a mean context of
about 576; `--prefill` so many prompts of 4,096 tokens with one output token each. Idle is what the
worker's device had nothing to do ahead of steps that only decode, by its own events. The prefix
cache is emptied before everything that is timed.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import checkpoints
from bench.client import Run, drive
from bench.deployment import Deployment, serving
from bench.records import Emit, add_json, spread, writer
from bench.workloads import PREFILL_LENGTH, Request, alike, prefills, workload

BATCHES = (1, 8, 32, 128, 256)


@dataclass(frozen=True, slots=True)
class Measured:
    """One run, and what its processes did meanwhile."""

    run: Run
    device_us: float  # of a decode step, mean
    idle_share: float  # of the device, between decode steps
    cpu_s_per_1000: dict[str, float]  # of each process, by output tokens


class Bench:
    """Measures one deployment."""

    def __init__(self, served: Deployment, options: argparse.Namespace, emit: Emit) -> None:
        self._served = served
        self._options = options
        self._emit = emit
        self._num_runs = 0

    def warm_up(self) -> None:
        """Pays for what only the first requests pay for."""
        self._run(workload(1, 8))

    def steps(self, batch: int) -> None:
        """The time of a decode step of so many requests."""
        runs = self._repeat(alike(batch, batch))
        step_ms = spread([one.run.step_ms for one in runs], 3)
        device_ms = spread([one.device_us / 1e3 for one in runs], 3)
        idle = spread([one.idle_share for one in runs], 5)
        print(
            f"batch {batch:4}: {step_ms['median']:.3f} ms a step {step_ms['each']}, device "
            f"{device_ms['median']:.3f} ms, idle {idle['median']:.2%}"
        )
        values = {"batch": batch, "step_ms": step_ms, "device_ms": device_ms, "idle_share": idle}
        self._record("steps", values)

    def prefill(self, num_prompts: int) -> None:
        """How fast prompts are computed, up to the last one's first token."""
        runs = self._repeat(prefills(num_prompts, num_prompts))
        num_tokens = num_prompts * PREFILL_LENGTH
        rate = spread([num_tokens / one.run.seconds for one in runs], 0)
        print(
            f"prefill of {num_prompts} x {PREFILL_LENGTH}: {rate['median']:.0f} prompt tokens/s "
            f"{rate['each']}"
        )
        values = {"num_prompts": num_prompts, "prompt_len": PREFILL_LENGTH, "tokens_per_s": rate}
        self._record("prefill", values)

    def workload(self, seed: int) -> None:
        """The 256 requests."""
        runs = self._repeat(workload(seed, self._options.num_requests))
        rate = spread([one.run.tokens_per_s for one in runs], 0)
        idle = spread([one.idle_share for one in runs], 5)
        cpu = {name: spread([one.cpu_s_per_1000[name] for one in runs], 4) for name in PROCESSES}
        num_tokens = sum(runs[0].run.num_tokens)
        print(
            f"seed {seed}, {num_tokens} tokens: {rate['median']:.0f} tokens/s {rate['each']}, "
            f"idle {idle['median']:.2%}, CPU s per 1,000 tokens: "
            + ", ".join(f"{name} {values['median']:.4f}" for name, values in cpu.items())
        )
        values = {
            "seed": seed,
            "num_requests": self._options.num_requests,
            "num_tokens": num_tokens,
            "tokens_per_s": rate,
            "idle_share": idle,
            "cpu_s_per_1000_tokens": cpu,
        }
        self._record("throughput", values)

    def _repeat(self, requests: Sequence[Request]) -> list[Measured]:
        return [self._run(requests) for _ in range(self._options.repeat)]

    def _run(self, requests: Sequence[Request]) -> Measured:
        served = self._served
        self._num_runs += 1
        served.forget_prefixes()
        cpu_before, before = served.cpu_s(), served.decode_time()
        tag, temperature = f"run-{self._num_runs}", self._options.temperature
        run = asyncio.run(drive(served.scheduler, requests, temperature, tag))
        cpu_after, after = served.cpu_s(), served.decode_time()
        busy_us, idle_us = after.busy_us - before.busy_us, after.idle_us - before.idle_us
        thousands = sum(run.num_tokens) / 1000
        return Measured(
            run=run,
            device_us=busy_us / max(1, after.num_steps - before.num_steps),
            idle_share=idle_us / max(1, busy_us + idle_us),
            cpu_s_per_1000={
                name: (cpu_after[name] - cpu_before[name]) / thousands for name in PROCESSES
            },
        )

    def _record(self, benchmark: str, values: dict[str, object]) -> None:
        options = self._options
        given = {
            "shape": options.shape,
            "temperature": options.temperature,
            "lookahead": options.lookahead,
            "max_num_batched_tokens": options.max_num_batched_tokens,
            "worker_options": options.worker,
        }
        self._emit(benchmark, {**given, **values})


PROCESSES = ("scheduler", "worker", "client")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.throughput", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--shape", choices=checkpoints.SHAPES, default="qwen3-0.6b")
    add("--model", type=Path, help="a folder that holds the shape's checkpoint already")
    add("--num-requests", type=int, default=256)
    add("--runs", type=int, default=2, help="workloads to time: of seeds 0, 2, 4, ...")
    add("--repeat", type=int, default=1, help="how often each thing is timed; medians are told")
    add("--steps", type=int, nargs="*", default=[], help="batches to time a step of")
    add("--prefill", type=int, nargs="*", default=[], help="numbers of long prompts to time")
    add("--temperature", type=float, default=0.0)
    add("--max-num-batched-tokens", type=int, default=8192)
    add("--lookahead", type=int, default=1, help="steps planned ahead: 0, 1, 2")
    add("--max-grant", type=int, help="most decode steps in a frame (default: the scheduler's)")
    add_json(parser)
    add("--worker", nargs=argparse.REMAINDER, default=[], help="worker options, at the end")
    options = parser.parse_args(arguments)
    if options.repeat < 1:
        parser.error(f"--repeat: {options.repeat} is not at least 1")
    return options


def main(arguments: Sequence[str]) -> int:
    """Measures steps, then prefills, then workloads."""
    options = parse(arguments)
    emit = writer(options.json, ["python", "-m", "bench.throughput", *arguments])
    if options.model is not None:
        _measure(options.model, options, emit)
        return 0
    with checkpoints.temporary(options.shape) as model:
        _measure(model, options, emit)
    return 0


def _measure(model: Path, options: argparse.Namespace, emit: Emit) -> None:
    scheduling = [
        *("--max-num-batched-tokens", str(options.max_num_batched_tokens)),
        *("--lookahead", str(options.lookahead)),
    ]
    if options.max_grant is not None:
        scheduling += ["--max-grant", str(options.max_grant)]
    with serving(model, options.worker, scheduling) as served:
        bench = Bench(served, options, emit)
        bench.warm_up()
        for batch in options.steps:
            bench.steps(batch)
        for num_prompts in options.prefill:
            bench.prefill(num_prompts)
        for index in range(options.runs):
            bench.workload(2 * index)


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    sys.exit(main(sys.argv[1:]))
