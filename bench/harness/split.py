"""Measurements through all processes: a client, a scheduler and a worker, with gRPC between them.

The prefix cache is emptied before everything that is timed. Idle is the share of the worker's
device, by its own events, before steps that only decode.
"""

import argparse
import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from bench.harness import checkpoints
from bench.harness.client import Run, drive
from bench.harness.deployment import Deployment, serving
from bench.harness.records import Results, add_json, spread
from bench.harness.workloads import (
    PREFILL_LENGTH,
    WorkloadRequest,
    alike,
    prefills,
    uneven,
    workload,
)
from pagewire.v1 import debug_pb2

WARM_TOKENS = 32
PROCESSES = ("scheduler", "worker", "client")


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One run, and its processes' CPU time."""

    run: Run
    first_step_id: int
    idle_share: float
    cpu_s_per_1000: dict[str, float]  # per process and 1000 output tokens


class Split:
    """Measures one deployment; every number is a median of `--repeat` runs."""

    def __init__(self, served: Deployment, options: argparse.Namespace, results: Results) -> None:
        self._served = served
        self._options = options
        self._results = results
        self._num_runs = 0
        self.is_complete = True  # whether everything requested could be measured
        # Pays the costs of the first requests.
        self._run([WorkloadRequest(request.prompt, WARM_TOKENS) for request in workload(1, 8)])

    def steps(self, batch: int) -> None:
        """Times a decode step of `batch` requests."""
        runs, full = [], []
        for _ in range(self._options.repeat):
            runs.append(self._run(alike(batch, batch)))
            last_steps = self._served.last_steps()
            full.append(side_by_side(last_steps, runs[-1].first_step_id, batch))
        if not all(full):
            worker = self._served.describe().description
            self._results.say(
                f"batch {batch:4}: not measured, they never decoded side by side: the worker has "
                f"{worker.max_num_seqs} slots and {worker.num_blocks} KV blocks"
            )
            self.is_complete = False
            return
        step_ms = spread([one.run.step_ms for one in runs], 3)
        device_ms = spread([mean(step.busy_us for step in one) / 1e3 for one in full], 3)
        idle = spread([idle_share(one) for one in full], 5)
        self._results.say(
            f"batch {batch:4}: {step_ms['median']:.3f} ms a step {step_ms['each']}, device "
            f"{device_ms['median']:.3f} ms, idle {idle['median']:.2%}"
        )
        values = {"batch": batch, "step_ms": step_ms, "device_ms": device_ms, "idle_share": idle}
        self._record("steps", values)

    def prefill(self, num_prompts: int) -> None:
        """Times prompts up to the last one's first token."""
        runs = self._repeat(prefills(num_prompts, num_prompts))
        num_tokens = num_prompts * PREFILL_LENGTH
        rate = spread([num_tokens / one.run.seconds for one in runs], 0)
        self._results.say(
            f"prefill of {num_prompts} x {PREFILL_LENGTH}: {rate['median']} prompt tokens/s "
            f"{rate['each']}"
        )
        values = {"num_prompts": num_prompts, "prompt_len": PREFILL_LENGTH, "tokens_per_s": rate}
        self._record("prefill", values)

    def workload(self, seed: int, num_requests: int) -> None:
        """Times requests of the published lengths, all at once."""
        runs = self._repeat(workload(seed, num_requests))
        rate = spread([one.run.tokens_per_s for one in runs], 0)
        idle = spread([one.idle_share for one in runs], 5)
        cpu = {name: spread([one.cpu_s_per_1000[name] for one in runs], 4) for name in PROCESSES}
        num_tokens = sum(runs[0].run.num_tokens)
        self._results.say(
            f"seed {seed}, {num_tokens} tokens: {rate['median']} tokens/s {rate['each']}, "
            f"idle {idle['median']:.2%}, CPU s per 1,000 tokens: "
            + ", ".join(f"{name} {values['median']:.4f}" for name, values in cpu.items())
        )
        values = {
            "seed": seed,
            "num_requests": num_requests,
            "num_tokens": num_tokens,
            "tokens_per_s": rate,
            "idle_share": idle,
            "cpu_s_per_1000_tokens": cpu,
        }
        self._record("throughput", values)

    def static(self, num_requests: int) -> None:
        """Times requests all at once, and in batches of the worker's slots that end together."""
        requests = uneven(0, num_requests)
        num_slots = self._served.describe().description.max_num_seqs
        batches = [requests[at : at + num_slots] for at in range(0, num_requests, num_slots)]
        joined, apart = [], []
        for _ in range(self._options.repeat):
            joined.append(self._run(requests).run.tokens_per_s)
            runs = [self._run(batch).run for batch in batches]
            apart.append(
                sum(sum(run.num_tokens) for run in runs) / sum(run.seconds for run in runs)
            )
        continuous, static = spread(joined, 0), spread(apart, 0)
        ratio = median(joined) / median(apart)
        self._results.say(
            f"{num_requests} requests, {num_slots} slots: {continuous['median']} tokens/s "
            f"{continuous['each']}, in batches {static['median']} {static['each']}: {ratio:.2f}x"
        )
        values = {"num_requests": num_requests, "slots": num_slots, "ratio": round(ratio, 3)}
        self._record("static", {**values, "continuous": continuous, "static": static})

    def _repeat(self, requests: Sequence[WorkloadRequest]) -> list[MeasuredRun]:
        return [self._run(requests) for _ in range(self._options.repeat)]

    def _run(self, requests: Sequence[WorkloadRequest]) -> MeasuredRun:
        served = self._served
        self._num_runs += 1
        served.forget_prefixes()
        cpu_before, before = served.cpu_s(), served.describe()
        tag, temperature = f"run-{self._num_runs}", self._options.temperature
        run = asyncio.run(drive(served.scheduler, requests, temperature, tag))
        cpu_after, after = served.cpu_s(), served.describe()
        busy_us = after.decode_time.busy_us - before.decode_time.busy_us
        idle_us = after.decode_time.idle_us - before.decode_time.idle_us
        thousands = sum(run.num_tokens) / 1000
        return MeasuredRun(
            run=run,
            first_step_id=before.last_step_id + 1,
            idle_share=idle_us / max(1, busy_us + idle_us),
            cpu_s_per_1000={
                name: (cpu_after[name] - cpu_before[name]) / thousands for name in PROCESSES
            },
        )

    def _record(self, benchmark: str, values: dict[str, object]) -> None:
        given = vars(self._options)
        setting = {name: given[name] for name in SETTING}
        self._results.add(benchmark, {**setting, **values})


def side_by_side(
    steps: Iterable[debug_pb2.StepSummary], first_step_id: int, batch: int
) -> list[debug_pb2.StepSummary]:
    """Steps since `first_step_id` that decode the whole batch right after another such step."""
    decodes = {
        step.step_id: step
        for step in steps
        if step.step_id >= first_step_id
        and step.num_decode_rows == batch
        and not step.num_prefill_rows
    }
    return [step for step_id, step in sorted(decodes.items()) if step_id - 1 in decodes]


def idle_share(steps: Sequence[debug_pb2.StepSummary]) -> float:
    """The fraction of the steps' time in which the device was idle."""
    idle_us, busy_us = sum(step.idle_us for step in steps), sum(step.busy_us for step in steps)
    return idle_us / max(1, idle_us + busy_us)


SETTING = ("shape", "temperature", "lookahead", "max_grant", "max_num_batched_tokens", "worker")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options for model, services and repeats."""
    add = parser.add_argument
    add("--shape", choices=checkpoints.SHAPES, default="qwen3-0.6b")
    add("--model", type=Path, help="folder with the shape's checkpoint")
    add("--repeat", type=_positive, default=3, help="runs per median (default: 3)")
    add("--temperature", type=float, default=0.0)
    add("--max-num-batched-tokens", type=int, default=8192)
    add("--lookahead", type=int, default=1, help="steps planned ahead: 0, 1, 2")
    add("--max-grant", type=int, help="most decode steps in a frame (default: the scheduler's)")
    add_json(parser)
    add("--worker", nargs=argparse.REMAINDER, default=[], help="worker options, at the end")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


@contextlib.contextmanager
def started(options: argparse.Namespace, results: Results) -> Iterator[Split]:
    """A warm deployment, stopped after the block."""
    scheduling = [
        *("--max-num-batched-tokens", str(options.max_num_batched_tokens)),
        *("--lookahead", str(options.lookahead)),
    ]
    if options.max_grant is not None:
        scheduling += ["--max-grant", str(options.max_grant)]
    with contextlib.ExitStack() as on:
        model = options.model or on.enter_context(checkpoints.temporary(options.shape))
        served = on.enter_context(serving(model, options.worker, scheduling))
        yield Split(served, options, results)
