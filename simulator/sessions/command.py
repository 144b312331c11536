"""`pagewire simulate --sessions`: what the production core computes of agents' sessions.

Printed is each pool's number of prompt tokens computed over those that a boundless cache computes,
next to that of a plain LRU cache and of the offline optimum on which turns never meet.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

from scheduler_svc.core import SchedulerConfig
from scheduler_svc.core.estimate.step_time import StepTime
from simulator.capacity.step_times import parse_step_time
from simulator.sessions import offline
from simulator.sessions.served import ToldHints, serve
from simulator.sessions.spec import PRESETS, SessionSpec, read_spec
from simulator.sessions.trace import SessionTrace, draw

# Of an 8B model on an H200: a step of decode, and 2,048 tokens of a prompt in 39 ms.
_STEP_TIME = StepTime(0.006, 1.9e-5, 0.0)
_COPY_S = 5e-5  # of a block of its KV cache, 2.25 MiB, over PCIe at 47 GB/s
_POOLS = (1.0, 2.0, 4.0, 8.0)
HINTS = ("names", "ends")


@dataclass(frozen=True, slots=True)
class PoolResult:
    """The tokens computed with one pool, over those of a boundless cache."""

    need_over_pool: float
    num_blocks: int
    computed: float  # by the production core
    plain_lru: float  # by LRU, if turns were served in order and in no time
    optimum: float  # by the offline optimum of the same
    num_preemptions: int
    max_waiting: int
    busy_share: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class SessionTotals:
    """The size of a trace."""

    num_sessions: int  # subagents included
    num_turns: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_ideal_tokens: int  # that a boundless cache computes
    num_needed_blocks: int  # that hold all contexts that will go on, at the worst moment


def add_session_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that are of sessions alone."""
    add = parser.add_argument_group("sessions of agents; see docs/sessions.md").add_argument
    presets = ", ".join(PRESETS)
    add("--sessions", metavar="PRESET|FILE", help=f"{presets}, or a file with a spec")
    add(
        "--scale",
        type=int,
        metavar="N",
        help="an Nth of the spec's tokens, each of which takes N times as long (default 1)",
    )
    add(
        "--need-over-pool",
        type=_positive,
        nargs="+",
        metavar="X",
        help="pools to try: the blocks that live sessions need over those there are (1 2 4 8)",
    )
    add(
        "--tier-over-pool",
        type=_positive,
        metavar="X",
        help="a host tier of X times the pool's blocks; 16 tokens are copied in 50 us",
    )
    add(
        "--hints",
        nargs="+",
        choices=HINTS,
        help="what clients say of each turn: the names of its session and of the one that awaits "
        "it, and which turn is the last one",
    )
    add(
        "--hint-ttl-s",
        type=_positive,
        metavar="SECONDS",
        help="clients say, too, that the next turn comes within so long",
    )


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be positive")
    return value


def run_sessions(options: argparse.Namespace, config: SchedulerConfig, lookahead: int) -> int:
    """Simulates and prints. Raises ValueError for what cannot be, and OSError."""
    began_s = time.perf_counter()
    spec, step_time = _scaled(options)
    trace = draw(spec, options.seed or 0, step_time)
    config = replace(config, max_model_len=spec.max_tokens)
    totals = _totals(trace, config.block_size)
    say = _say_json if options.json else _say_table
    results = _results(options, trace, totals, config, step_time, lookahead)
    say(totals, results, lambda: time.perf_counter() - began_s)
    return 0


def _scaled(options: argparse.Namespace) -> tuple[SessionSpec, StepTime]:
    told = _STEP_TIME if options.step_time is None else parse_step_time(options.step_time)
    factor = 1 if options.scale is None else options.scale
    if factor < 1:
        raise ValueError(f"--scale is {factor}, must be at least 1")
    spec = read_spec(options.sessions)
    if factor == 1:
        return spec, told
    return spec.scaled(factor), StepTime(
        told.base_s * factor, told.per_token_s * factor, told.per_context_token_s * factor**2
    )


def _totals(trace: SessionTrace, block_size: int) -> SessionTotals:
    ideal = offline.ideal(trace, block_size)
    return SessionTotals(
        num_sessions=len({turn.session for turn in trace.turns}),
        num_turns=len(trace.turns),
        num_prompt_tokens=ideal.num_prompt_tokens,
        num_output_tokens=sum(turn.output_tokens for turn in trace.turns),
        num_ideal_tokens=ideal.num_computed_tokens,
        num_needed_blocks=-(-trace.most_alive_tokens // block_size),
    )


def _results(
    options: argparse.Namespace,
    trace: SessionTrace,
    totals: SessionTotals,
    config: SchedulerConfig,
    step_time: StepTime,
    lookahead: int,
) -> Iterator[PoolResult]:
    need, ideal = totals.num_needed_blocks, totals.num_ideal_tokens
    pools = options.need_over_pool or _POOLS
    hints = ToldHints(**dict.fromkeys(options.hints or (), True), ttl_s=options.hint_ttl_s)
    if options.num_blocks is not None:
        pools = [need / max(options.num_blocks - 1, 1)]
    for ratio in pools:
        num_blocks = max(round(need / ratio), 1)
        num_tier_blocks = round(num_blocks * (options.tier_over_pool or 0.0))
        sized = replace(config, num_blocks=num_blocks + 1, num_tier_blocks=num_tier_blocks)
        copy_s = _COPY_S * (options.scale or 1)
        served = serve(trace, sized, step_time, lookahead, hints, copy_s)
        lru, optimum = (
            offline.replay(trace, config.block_size, num_blocks, evict).num_computed_tokens
            for evict in (offline.Evict.OLDEST, offline.Evict.FARTHEST)
        )
        yield PoolResult(
            need_over_pool=ratio,
            num_blocks=num_blocks,
            computed=served.num_prefill_tokens / ideal,
            plain_lru=lru / ideal,
            optimum=optimum / ideal,
            num_preemptions=served.num_preemptions,
            max_waiting=served.max_waiting,
            busy_share=served.busy_s / served.duration_s,
            duration_s=served.duration_s,
        )


def _say_table(
    totals: SessionTotals, results: Iterator[PoolResult], took_s: Callable[[], float]
) -> None:
    seen = 1 - totals.num_ideal_tokens / totals.num_prompt_tokens
    lines = [
        f"{totals.num_turns} turns of {totals.num_sessions} sessions: "
        f"{totals.num_prompt_tokens} prompt tokens, {100 * seen:.1f}% of them seen before, "
        f"{totals.num_prompt_tokens / totals.num_output_tokens:.0f} in for one out; "
        f"live sessions need {totals.num_needed_blocks} blocks",
        f"{'':10}{'':>9}{'tokens computed / ideal':^33}",
        f"{'need/pool':10}{'blocks':>9}{'pagewire':>11}{'plain LRU':>11}{'optimum':>11}"
        f"{'preempted':>11}{'queue':>7}{'busy':>7}{'seconds':>9}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    for result in results:
        sys.stdout.write(
            f"{result.need_over_pool:<10.4g}{result.num_blocks:>9}{result.computed:>11.3f}"
            f"{result.plain_lru:>11.3f}{result.optimum:>11.3f}{result.num_preemptions:>11}"
            f"{result.max_waiting:>7}{100 * result.busy_share:>6.0f}%{result.duration_s:>9.0f}\n"
        )
        sys.stdout.flush()  # a pool takes minutes at full scale
    sys.stdout.write(f"simulated in {took_s():.1f} s\n")


def _say_json(
    totals: SessionTotals, results: Iterator[PoolResult], took_s: Callable[[], float]
) -> None:
    pools = [asdict(result) for result in results]
    sys.stdout.write(json.dumps(asdict(totals) | {"pools": pools, "took_s": took_s()}) + "\n")
