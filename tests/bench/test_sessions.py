"""Sixteen sessions of eleven turns, served over the wire: counted by tokens, never by time."""

from dataclasses import replace

import pytest

from bench.sessions import BLOCK_SIZE, LOOKAHEAD, LiveTexts, config_of, in_order, play
from scheduler_svc.core import CachePolicy
from scheduler_svc.core.estimate.step_time import StepTime
from simulator.sessions.offline import Evict, ideal, replay
from simulator.sessions.served import ToldHints, serve
from simulator.sessions.spec import LogNormal, SessionSpec
from simulator.sessions.trace import SessionTrace, draw
from simulator.workers.fake_worker import FakeModel
from tests.scheduler_svc.conftest import cluster

# The case of docs/sessions.md, with an eighth of the tokens.
SPEC = SessionSpec(
    sessions=16,
    concurrency=16,
    turns=LogNormal(11),
    system_prompts=1,
    system_tokens=128,
    first_tokens=LogNormal(25, 0.4, 50),
    new_tokens=LogNormal(25, 0.4, 50),
    output_tokens=LogNormal(4),
    tool_pause_s=LogNormal(2, 1.0),
    person_share=0.0,
    person_pause_s=LogNormal(60),
    subagent_share=0.0,
    subagents=0,
    subagent_turns=LogNormal(1),
    max_tokens=1024,
    compact_tokens=128,
)
STEP_TIME = StepTime(0.0, 0.0, 0.0)


def sixteen() -> SessionTrace:
    return in_order(draw(SPEC, 0, StepTime(0.002, 1e-5, 0.0)))


async def computed(
    trace: SessionTrace, num_blocks: int, policy: CachePolicy, hints: ToldHints
) -> int:
    """Prompt tokens that a scheduler with a fake worker has computed for a trace."""
    config = config_of(num_blocks, SPEC.max_tokens)
    model = FakeModel(
        num_blocks=config.num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        vocab_size=config.vocab_size,
    )
    limits = {
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "lookahead": LOOKAHEAD,
        "cache_policy": policy,
    }
    async with cluster(model, STEP_TIME, **limits) as running:
        await play(running.scheduler, trace, config.vocab_size, hints)
        return running.core.counters.num_prefill_tokens


@pytest.mark.parametrize("ratio", [0.5, 2, 4])
async def test_live_turns_compute_what_the_simulation_says(ratio: float) -> None:
    trace = sixteen()
    assert (len({turn.session for turn in trace.turns}), len(trace.turns)) == (16, 176)
    num_blocks = round(trace.most_alive_tokens / BLOCK_SIZE / ratio)
    hints = ToldHints(names=True, ends=True)
    live = await computed(trace, num_blocks, CachePolicy.LRU, hints)
    config = config_of(num_blocks, SPEC.max_tokens)
    simulated = serve(trace, config, StepTime(0.002, 1e-5, 0.0), LOOKAHEAD, hints)
    assert live == simulated.num_prefill_tokens
    least = ideal(trace, BLOCK_SIZE).num_computed_tokens
    if ratio < 1:
        assert live == least, "with room for all each token is computed once"
    else:
        plain = replay(trace, BLOCK_SIZE, num_blocks, Evict.OLDEST).num_computed_tokens
        assert least < live <= 1.2 * plain


async def test_with_room_for_all_sessions_that_meet_compute_each_token_once() -> None:
    """A closed loop without pauses, in whatever order this machine serves the turns."""
    turns = [replace(turn, at_s=0.0, pause_s=0.0) for turn in draw(SPEC, 0, STEP_TIME).turns]
    trace = SessionTrace(turns, 0)
    num_blocks = sum(turn.prompt_tokens for turn in turns) // BLOCK_SIZE
    live = await computed(trace, num_blocks, CachePolicy.SESSIONS, ToldHints(names=True))
    least = ideal(trace, BLOCK_SIZE).num_computed_tokens
    # The first turns come at once, before the beginning that they share can be found.
    most = least + 15 * SPEC.system_tokens
    assert least <= live <= most


def test_a_prompt_repeats_what_was_really_answered() -> None:
    first, second = [turn for turn in sixteen().turns if turn.session == 0][:2]
    texts = LiveTexts(0, 32_000)
    prompt = texts.prompt(first)
    answer = [7, 8, 9, 10]
    texts.answered(first, answer)
    grown = texts.prompt(second)
    assert grown[: len(prompt)].tolist() == prompt.tolist()
    assert grown[len(prompt) : len(prompt) + 4].tolist() == answer
    assert len(grown) == second.prompt_tokens
