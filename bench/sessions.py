"""Agents' sessions on a real scheduler and worker, and what `pagewire simulate` says of them.

    python -m bench.sessions codex --scale 256 --need-over-pool 2 [--cache-policy lru sessions]
    python -m bench.sessions spec.json --in-order

A closed loop: a turn is sent its pause after the turns that it follows have ended, and its prompt
repeats what the model has answered. The prompt tokens that were computed are read from the
scheduler's counters, and told over those that a boundless cache computes, next to the simulation of
the same turns with step times as they were here. With --in-order one turn is sent after the other
at once, so that nothing depends on the machine's speed. The model has random weights.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import grpc
import numpy as np
from numpy.typing import NDArray

from bench.harness import checkpoints
from bench.harness.deployment import Deployment, serving
from bench.harness.records import Results, add_json, new_parser
from pagewire.v1 import debug_pb2, scheduler_pb2, scheduler_pb2_grpc, types_pb2
from scheduler_svc.core import CachePolicy, SchedulerConfig, SessionHint
from scheduler_svc.core.estimate.step_time import StepTime
from simulator.capacity.step_times import MeasuredStep, fit
from simulator.sessions import offline
from simulator.sessions.served import ToldHints, serve
from simulator.sessions.spec import read_spec
from simulator.sessions.trace import VOCAB_SIZE, SessionTrace, SessionTurn, Texts, draw

BLOCK_SIZE, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 16, 32, 512
LOOKAHEAD = 1
STEP_TIME = StepTime(0.002, 2e-6, 0.0)  # of the tiny model on a CPU, about: it orders the turns
NO_HINTS = ToldHints()
TITLE = (
    f"{'policy':10}{'need/pool':>10}{'blocks':>8}{'live':>9}{'simulated':>11}{'error':>8}"
    f"{'plain LRU':>11}{'optimum':>9}{'seconds':>9}"
)


@dataclass(frozen=True, slots=True)
class LiveSessions:
    """Tokens computed, over those of a boundless cache."""

    policy: str
    need_over_pool: float
    num_blocks: int
    live: float
    simulated: float
    plain_lru: float
    optimum: float
    duration_s: float

    @property
    def error(self) -> float:
        """Relative error of the simulation."""
        return self.simulated / self.live - 1


class LiveTexts:
    """The texts of a trace, with what was really answered in the place of its answers."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._texts = Texts(seed)
        self._vocab_size = vocab_size
        self._answers: dict[int, list[tuple[int, NDArray[np.int32]]]] = {}

    def prompt(self, turn: SessionTurn) -> NDArray[np.int32]:
        """The tokens of a turn's prompt."""
        return np.concatenate([self._of(piece.text, piece.num_tokens) for piece in turn.pieces])

    def answered(self, turn: SessionTurn, token_ids: Sequence[int]) -> None:
        """Notes the answer to a turn, which the next prompts of its text repeat."""
        last = turn.pieces[-1]
        answer = np.array(token_ids, dtype=np.int32)
        self._answers.setdefault(last.text, []).append((last.num_tokens, answer))

    def _of(self, text: int, end: int) -> NDArray[np.int32]:
        tokens = self._texts.of(text, end) % self._vocab_size
        for begin, answer in self._answers.get(text, ()):
            if begin < end:
                tokens[begin : begin + len(answer)] = answer[: end - begin]
        return tokens


async def play(
    stub: "scheduler_pb2_grpc.SchedulerServiceAsyncStub",
    trace: SessionTrace,
    vocab_size: int,
    hints: ToldHints = NO_HINTS,
) -> None:
    """Sends each turn its pause after the turns that it follows; returns when all have ended.

    Raises AioRpcError for a turn that fails: others of its session would repeat no answer.
    """
    texts, ends = LiveTexts(trace.seed, vocab_size), [asyncio.Event() for _ in trace.turns]
    began_s = time.perf_counter()

    async def take(number: int, turn: SessionTurn) -> None:
        if turn.follows:
            for followed in turn.follows:
                await ends[followed].wait()
            await asyncio.sleep(turn.pause_s)
        else:
            await asyncio.sleep(max(began_s + turn.at_s - time.perf_counter(), 0.0))
        texts.answered(turn, await _ask(stub, texts.prompt(turn), number, turn, hints.of(turn)))
        ends[number].set()

    async with asyncio.TaskGroup() as group:
        for number, turn in enumerate(trace.turns):
            group.create_task(take(number, turn))


async def _ask(
    stub: "scheduler_pb2_grpc.SchedulerServiceAsyncStub",
    prompt: NDArray[np.int32],
    number: int,
    turn: SessionTurn,
    hint: SessionHint | None,
) -> list[int]:
    """The answer to a turn."""
    request = scheduler_pb2.SchedulerServiceGenerateRequest(
        request_id=f"turn-{number}",
        prompt_token_ids=prompt.tolist(),
        sampling=types_pb2.SamplingParams(
            temperature=0, max_tokens=turn.output_tokens, ignore_eos=True
        ),
    )
    if hint is not None:
        told = request.session
        told.session_id, told.parent_session_id = hint.session_id, hint.parent_id
        if hint.ttl_s is not None:
            told.ttl_s = hint.ttl_s
    return [token async for part in stub.Generate(request) for token in part.token_ids]


def in_order(trace: SessionTrace) -> SessionTrace:
    """The same turns, each sent as soon as the one before has ended."""
    turns = [
        replace(turn, at_s=0.0, follows=(number - 1,) if number else (), pause_s=0.0)
        for number, turn in enumerate(trace.turns)
    ]
    return SessionTrace(turns, trace.seed)


def config_of(num_blocks: int, max_model_len: int) -> SchedulerConfig:
    """The scheduler as it is run here."""
    return SchedulerConfig(
        num_blocks=num_blocks + 1,
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
    )


def measure(
    trace: SessionTrace, policy: CachePolicy, ratio: float, max_tokens: int, hints: ToldHints
) -> LiveSessions:
    """Runs a trace with a pool of so many times less than its need."""
    vocab_size = checkpoints.vocab_size_of("tiny")
    num_blocks = max(round(trace.most_alive_tokens / BLOCK_SIZE / ratio), 1)
    limits = {
        "--num-kv-blocks": num_blocks + 1,
        "--block-size": BLOCK_SIZE,
        "--max-num-seqs": MAX_NUM_SEQS,
        "--max-num-batched-tokens": MAX_NUM_BATCHED_TOKENS,
        "--max-model-len": max_tokens,
    }
    worker = ["--device", "cpu", *(str(word) for pair in limits.items() for word in pair)]
    scheduler = ("--cache-policy", policy.value, "--lookahead", str(LOOKAHEAD))
    with checkpoints.temporary("tiny") as model, serving(model, worker, scheduler) as deployment:
        began_s = time.perf_counter()
        computed = asyncio.run(_computed(deployment, trace, vocab_size, hints))
        duration_s = time.perf_counter() - began_s
        steps = [step for step in deployment.last_answered_steps() if step.duration_us]
    step_time = fit(map(_measured, steps))
    config = replace(config_of(num_blocks, max_tokens), cache_policy=policy)
    simulated = serve(trace, config, step_time, LOOKAHEAD, hints).num_prefill_tokens
    ideal = offline.ideal(trace, BLOCK_SIZE).num_computed_tokens
    lru, optimum = (
        offline.replay(trace, BLOCK_SIZE, num_blocks, evict).num_computed_tokens
        for evict in (offline.Evict.OLDEST, offline.Evict.FARTHEST)
    )
    return LiveSessions(
        policy=policy.value,
        need_over_pool=ratio,
        num_blocks=num_blocks,
        live=computed / ideal,
        simulated=simulated / ideal,
        plain_lru=lru / ideal,
        optimum=optimum / ideal,
        duration_s=duration_s,
    )


async def _computed(
    deployment: Deployment, trace: SessionTrace, vocab_size: int, hints: ToldHints
) -> int:
    """Prompt tokens that the scheduler had computed for a trace."""
    async with grpc.aio.insecure_channel(deployment.scheduler) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        before = await stub.GetStatus(scheduler_pb2.GetStatusRequest())
        await play(stub, trace, vocab_size, hints)
        after = await stub.GetStatus(scheduler_pb2.GetStatusRequest())
    return after.num_prefill_tokens - before.num_prefill_tokens


def _measured(step: debug_pb2.StepSummary) -> MeasuredStep:
    context = sum(row.num_computed_tokens for row in step.rows)
    return MeasuredStep(step.num_tokens, context, step.duration_us / 1e6)


def line(result: LiveSessions) -> str:
    """A row of the table."""
    return (
        f"{result.policy:10}{result.need_over_pool:>10g}{result.num_blocks:>8}{result.live:>9.3f}"
        f"{result.simulated:>11.3f}{100 * result.error:>7.1f}%{result.plain_lru:>11.3f}"
        f"{result.optimum:>9.3f}{result.duration_s:>9.0f}"
    )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = new_parser("bench.sessions", __doc__)
    add = parser.add_argument
    add("sessions", help="a preset or a file, as of pagewire simulate --sessions")
    add("--scale", type=int, default=1, metavar="N", help="an Nth of all tokens")
    add("--pause-scale", type=float, default=1.0, metavar="X", help="X times all pauses")
    add("--seed", type=int, default=0)
    add("--need-over-pool", type=float, nargs="+", default=[2.0])
    policies = [policy.value for policy in CachePolicy]
    add("--cache-policy", nargs="+", choices=policies, default=policies)
    add("--hints", action="store_true", help="turns say their session, its parent and its end")
    add("--in-order", action="store_true", help="one turn after the other, without pauses")
    add_json(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    results = Results(options.json, ["python", "-m", "bench.sessions", *arguments])
    spec = read_spec(options.sessions)
    spec = spec if options.scale == 1 else spec.scaled(options.scale)
    trace = draw(spec, options.seed, STEP_TIME)
    pauses = [
        replace(
            turn, at_s=turn.at_s * options.pause_scale, pause_s=turn.pause_s * options.pause_scale
        )
        for turn in trace.turns
    ]
    trace = SessionTrace(pauses, trace.seed)
    trace = in_order(trace) if options.in_order else trace
    hints = ToldHints(names=options.hints, ends=options.hints)
    results.say(TITLE)
    for policy in options.cache_policy:
        for ratio in options.need_over_pool:
            result = measure(trace, CachePolicy(policy), ratio, spec.max_tokens, hints)
            results.say(line(result))
            results.add("sessions", {"result": asdict(result), "error": result.error})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
