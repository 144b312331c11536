"""Capacity questions, answered by the production scheduler under a virtual clock.

    python -m simulator.simulate --rate 20 --requests 2000 --prompt-tokens 100:1024 \\
        --output-tokens 100:1024 --step-time 0.0007,1.8e-5,1.6e-8 --num-blocks 20000 --ttft-p99-s 1

    python -m simulator.simulate --trace requests.jsonl --step-time measured.json --json

    python -m simulator.simulate --recording records/ --policy fair --num-blocks 8000

    python -m simulator.simulate --recording records/ --speculative-config '{"method": "ngram"}'

    python -m simulator.simulate --sessions codex --scale 16 --need-over-pool 2 4 8

Options that are not listed here are those of the scheduler process (`python -m scheduler_svc
--help`), with the same defaults.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pagewire.v1 import types_pb2, worker_pb2
from scheduler_svc import config as scheduler_options
from scheduler_svc.config import ServiceConfig
from scheduler_svc.core import SchedulerConfig
from scheduler_svc.core.estimate.step_time import StepTime
from scheduler_svc.core_config import core_config
from scheduler_svc.journal.recording import NotReplayable
from scheduler_svc.journal.records import Damaged
from simulator.capacity import rate_search
from simulator.capacity.measures import (
    CapacityObjective,
    DraftSummary,
    Latency,
    WorkloadSummary,
    summarize,
)
from simulator.capacity.recorded import RecordedWorkload, read_recorded
from simulator.capacity.speculation import add_draft_options, take_draft_options
from simulator.capacity.step_times import fit, parse_step_time
from simulator.capacity.virtual_server import VirtualServer
from simulator.capacity.workload import Arrival, Range, Synthetic, rate_per_s, read_trace
from simulator.sessions.command import add_session_options, run_sessions

# Scheduler options that a virtual server applies: those of the core, the look-ahead, the target for
# the time between tokens, and what is drafted. Not the destination of preempted KV: swapping takes
# host blocks, and copies have no step time.
_OBEYED = {*SchedulerConfig.__dataclass_fields__, "lookahead", "target_itl_ms"} - {"preemption"}
_OBEYED |= {"speculative_config"}

_USUAL = SchedulerConfig(
    num_blocks=4096,
    block_size=16,
    max_num_seqs=256,
    max_num_batched_tokens=2048,
    max_model_len=8192,
    vocab_size=32_000,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulates and prints; returns 1 when no rate meets the objective."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    try:
        service = _service_config(rest)
        if options.sessions is not None:
            return _simulate_sessions(options, service)
        workload = None if options.recording is None else read_recorded(options.recording)
        arrivals, objective = _arrivals(options, workload), _objective(options)
        core, step_time = _core_config(options, service, workload), _step_time(options, workload)
        has_text = None if workload is None else workload.has_text
        speculation = take_draft_options(options, service.speculative_config, has_text)
    except (ValueError, OSError, NotReplayable, Damaged) as error:
        parser.error(str(error))

    def make_server() -> VirtualServer:
        target_s = None if service.target_itl_ms is None else service.target_itl_ms / 1e3
        ahead, wire_s = service.lookahead, options.wire_s
        return VirtualServer(core, step_time, ahead, wire_s, target_s, speculation)

    began_s = time.perf_counter()
    try:
        summary = summarize(make_server().serve(arrivals))
        tried = (
            [] if objective.is_empty else [*rate_search.trials(make_server, arrivals, objective)]
        )
    except ValueError as error:
        parser.error(str(error))
    took_s = time.perf_counter() - began_s
    say = _say_json if options.json else _say_table
    say(rate_per_s(arrivals), summary, objective, tried, took_s)
    return 0 if objective.is_empty or rate_search.highest(tried) else 1


def _simulate_sessions(options: argparse.Namespace, service: ServiceConfig) -> int:
    for name in _NOT_OF_SESSIONS:
        if getattr(options, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} has no effect with --sessions")
    if service.speculative_config is not None or service.target_itl_ms is not None:
        raise ValueError("--speculative-config and --target-itl-ms have no effect with --sessions")
    return run_sessions(options, _core_config(options, service, None), service.lookahead)


# --- options -------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagewire simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument_group("workload").add_argument
    add("--trace", type=Path, metavar="FILE", help="JSON lines; see docs/simulation.md")
    add("--recording", type=Path, metavar="DIR", help="a scheduler's recording (--record)")
    add("--rate", type=float, metavar="R", help="Poisson arrivals per second, on average")
    add("--requests", type=int, metavar="N", help="number of requests (default 1000)")
    add("--prompt-tokens", type=_range, metavar="LO:HI", help="tokens per prompt (default 256)")
    add("--output-tokens", type=_range, metavar="LO:HI", help="tokens per answer (default 128)")
    add("--num-prefixes", type=int, metavar="N", help="shared prompt prefixes (default 0)")
    add("--prefix-tokens", type=int, metavar="N", help="tokens per prefix (default 0)")
    add("--seed", type=int, help="seed of the random workload and of --acceptance (default 0)")
    add = parser.add_argument_group("worker").add_argument
    add(
        "--step-time",
        metavar="B,T,C|FILE",
        help="seconds per step: base, per computed token, per context token; or measured steps "
        "(default: those of --recording)",
    )
    add("--num-blocks", type=int, metavar="N", help="KV blocks (default 4096 or as recorded)")
    add("--block-size", type=int, metavar="N", help="tokens per block (default 16 or as recorded)")
    add("--max-model-len", type=int, metavar="N", help="tokens per request (8192 or as recorded)")
    add(
        "--wire-s",
        type=float,
        default=0.0002,
        help="one-way latency between scheduler and worker (0.2 ms)",
    )
    add_session_options(parser)
    add_draft_options(parser)
    add = parser.add_argument_group(
        "objective, to find the highest rate that meets it"
    ).add_argument
    add("--ttft-p99-s", type=float, metavar="S", help="p99 time from arrival to first token")
    add("--tpot-p99-s", type=float, metavar="S", help="p99 of the mean time between tokens")
    add("--e2e-p99-s", type=float, metavar="S", help="p99 time from arrival to last token")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    return parser


def _range(text: str) -> Range:
    low, colon, high = text.partition(":")
    try:
        return Range(int(low), int(high if colon else low))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not LO:HI ({error})") from None


_SYNTHETIC = (
    "rate", "requests", "prompt_tokens", "output_tokens", "num_prefixes", "prefix_tokens", "seed"
)  # fmt: skip


# Options that have no effect with --sessions: a spec says the lengths, and copies have no wire.
_NOT_OF_SESSIONS = (
    "trace", "recording", *(name for name in _SYNTHETIC if name != "seed"), "max_model_len",
    "acceptance", "draft_step_time", "ttft_p99_s", "tpot_p99_s", "e2e_p99_s",
)  # fmt: skip


def _arrivals(options: argparse.Namespace, workload: RecordedWorkload | None) -> list[Arrival]:
    for name in ("scale", "need_over_pool", "tier_over_pool"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} has no effect without --sessions")
    given = [name for name in _SYNTHETIC if getattr(options, name) is not None]
    if options.acceptance is not None:  # whose seed it is, too
        given = [name for name in given if name != "seed"]
    if options.trace is not None or workload is not None:
        told = "--recording" if options.trace is None else "--trace"
        if given or (options.trace is not None and workload is not None):
            option = "--" + (given[0].replace("_", "-") if given else "recording")
            raise ValueError(f"{option} generates what {told} contains; use one of them")
        arrivals = read_trace(options.trace) if workload is None else workload.arrivals
        if not arrivals:
            raise ValueError(f"{told} holds no request")
        return arrivals
    if options.rate is None:
        raise ValueError("one of --trace, --recording and --rate is needed")
    return Synthetic(
        rate_per_s=options.rate,
        num_requests=1000 if options.requests is None else options.requests,
        prompt_tokens=options.prompt_tokens or Range(256, 256),
        output_tokens=options.output_tokens or Range(128, 128),
        num_prefixes=options.num_prefixes or 0,
        prefix_tokens=options.prefix_tokens or 0,
        seed=options.seed or 0,
    ).arrivals()


def _step_time(options: argparse.Namespace, workload: RecordedWorkload | None) -> StepTime:
    if options.step_time is not None:
        return parse_step_time(options.step_time)
    if workload is None:
        raise ValueError("--step-time is needed without --recording")
    return fit(workload.steps)


def _objective(options: argparse.Namespace) -> CapacityObjective:
    return CapacityObjective(options.ttft_p99_s, options.tpot_p99_s, options.e2e_p99_s)


def _service_config(arguments: Sequence[str]) -> ServiceConfig:
    """The scheduler's options. Raises ValueError for one without an effect here."""
    config, usual = scheduler_options.parse(list(arguments)), scheduler_options.parse([])
    for name in ServiceConfig.__dataclass_fields__:
        if name not in _OBEYED and getattr(config, name) != getattr(usual, name):
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} has no effect without a worker and a wire")
    return config


def _core_config(
    options: argparse.Namespace, service: ServiceConfig, workload: RecordedWorkload | None
) -> SchedulerConfig:
    """The core's configuration, made from a worker's description as the scheduler would."""
    if not 0 <= options.wire_s < math.inf:
        raise ValueError(f"--wire-s is {options.wire_s}, must not be negative")
    usual = _USUAL if workload is None else workload.config
    worker = worker_pb2.WorkerDescription(
        model=types_pb2.ModelInfo(
            vocab_size=usual.vocab_size, max_model_len=options.max_model_len or usual.max_model_len
        ),
        num_blocks=options.num_blocks or usual.num_blocks,
        block_size=options.block_size or usual.block_size,
        max_num_seqs=service.max_num_seqs,
        max_num_batched_tokens=service.max_num_batched_tokens,
    )
    return core_config(service, worker)


# --- answers -------------------------------------------------------------------------------------


def _say_table(
    rate: float,
    summary: WorkloadSummary,
    objective: CapacityObjective,
    tried: Sequence[rate_search.Trial],
    took_s: float,
) -> None:
    simulated_s = summary.duration_s + sum(trial.summary.duration_s for trial in tried)
    lines = [*_tell_summary(rate, summary)]
    if not objective.is_empty:
        lines += ["", *_tell_capacity(tried)]
    lines += ["", f"{simulated_s:.0f} s simulated in {took_s:.1f} s"]
    sys.stdout.write("\n".join(lines) + "\n")


def _tell_summary(rate: float, summary: WorkloadSummary) -> list[str]:
    return [
        f"{summary.num_requests} requests at {rate:.2f}/s: {summary.num_completed} completed, "
        f"{summary.num_refused} refused, {summary.num_expired} expired, "
        f"{summary.duration_s:.1f} s",
        f"{'throughput':22}{summary.requests_per_s:10.2f} requests/s"
        f"{summary.output_tokens_per_s:12.0f} tokens out/s{summary.prompt_tokens_per_s:12.0f} in/s",
        f"{'latency, s':22}{'p50':>10}{'p90':>10}{'p99':>10}",
        _tell_latency("time to first token", summary.ttft),
        _tell_latency("time per output token", summary.tpot),
        _tell_latency("end to end", summary.e2e),
        f"{'worker':22}{100 * summary.busy_share:9.1f}% busy, {summary.num_steps} steps, "
        f"{summary.mean_batch:.1f} rows on average",
        f"{'KV cache':22}{100 * summary.peak_blocks:9.1f}% in use at most, "
        f"{summary.num_preemptions} preemptions, "
        f"{100 * summary.cached_share:.1f}% of prompt tokens cached",
        f"{'queue':22}{summary.max_waiting:10} at most",
        *_tell_drafts(summary.drafts),
    ]


def _tell_drafts(drafts: DraftSummary | None) -> list[str]:
    if drafts is None:
        return []
    if drafts.acceptance_rate is None or drafts.tokens_per_verification is None:
        return [f"{'drafts':22}{'none':>10} paid"]
    return [
        f"{'drafts':22}{100 * drafts.acceptance_rate:9.1f}% of {drafts.num_drafted_tokens} tokens "
        f"accepted, {drafts.tokens_per_verification:.2f} tokens a verification"
    ]


def _tell_latency(name: str, latency: Latency) -> str:
    return f"  {name:20}" + "".join(
        f"{seconds:10.4f}" if seconds < math.inf else f"{'never':>10}"
        for seconds in (latency.p50_s, latency.p90_s, latency.p99_s)
    )


def _tell_capacity(tried: Sequence[rate_search.Trial]) -> list[str]:
    best = rate_search.highest(tried)
    if best is None:
        return [f"no rate meets the objective: at {tried[-1].rate_per_s:.4g}/s {tried[-1].excess}"]
    if not rate_search.is_bounded(tried):
        return [
            f"every rate up to {best.rate_per_s:.4g}/s meets the objective: this workload is too "
            "small to find the limit; use more requests"
        ]
    over = min((t for t in tried if not t.is_met), key=lambda trial: trial.rate_per_s)
    return [
        f"capacity {best.rate_per_s:.2f} requests/s meets the objective "
        f"({best.summary.output_tokens_per_s:.0f} tokens out/s, worker "
        f"{100 * best.summary.busy_share:.0f}% busy)",
        f"at {over.rate_per_s:.2f}/s {over.excess}",
    ]


def _say_json(
    rate: float,
    summary: WorkloadSummary,
    objective: CapacityObjective,
    tried: Sequence[rate_search.Trial],
    took_s: float,
) -> None:
    best = rate_search.highest(tried)
    record = {
        "rate_per_s": rate,
        "summary": asdict(summary),
        "objective": None if objective.is_empty else asdict(objective),
        "capacity_per_s": best.rate_per_s if best else None,
        "is_bounded": rate_search.is_bounded(tried) if tried else None,
        "trials": [{"rate_per_s": trial.rate_per_s, "excess": trial.excess} for trial in tried],
        "took_s": took_s,
    }
    sys.stdout.write(json.dumps(_without_infinity(record)) + "\n")


def _without_infinity(value: object) -> object:
    """Replaces infinite times by null, since JSON has no infinity."""
    if isinstance(value, dict):
        return {name: _without_infinity(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_without_infinity(part) for part in value]
    return None if value == math.inf else value


if __name__ == "__main__":
    sys.exit(main())
