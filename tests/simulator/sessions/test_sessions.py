"""Sessions in virtual time: the trace, the offline bounds, and the production core next to them."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from scheduler_svc.core import CachePolicy, SchedulerConfig
from scheduler_svc.core.estimate.step_time import StepTime
from simulator import simulate
from simulator.capacity.coming import Coming
from simulator.capacity.workload import Arrival
from simulator.sessions.offline import Evict, ideal, replay
from simulator.sessions.served import serve
from simulator.sessions.spec import PRESETS, BadSpec, LogNormal, SessionSpec, read_spec
from simulator.sessions.trace import PromptPiece, SessionTrace, SessionTurn, Texts, draw

STEP_TIME = StepTime(0.001, 1e-6, 0.0)
CONFIG = SchedulerConfig(
    num_blocks=2,
    block_size=4,
    max_num_seqs=32,
    max_num_batched_tokens=512,
    max_model_len=4096,
    vocab_size=32_000,
)


def small(preset: str, **changes: object) -> SessionSpec:
    """A preset of few sessions and few tokens, subagents and compaction included."""
    spec = PRESETS[preset].scaled(256)
    turns = LogNormal(8, 0.5, 16)
    return replace(spec, sessions=8, concurrency=4, turns=turns, max_tokens=550, **changes)  # type: ignore[arg-type]


def turn(session: int, *pieces: PromptPiece, output: int = 1, at_s: float = 0.0) -> SessionTurn:
    return SessionTurn(session, None, at_s, (), 0.0, pieces, output, calls_tool=True, is_last=False)


def in_turns(*texts: int, num_tokens: int = 8) -> SessionTrace:
    """Turns that each read one text of two blocks, and nothing in common."""
    turns = [
        turn(text, PromptPiece(text, num_tokens), at_s=float(n)) for n, text in enumerate(texts)
    ]
    return SessionTrace(turns, seed=0)


# --- what is drawn -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "turns", "prompt", "seen", "in_for_out", "with_subagents"),
    [("codex", 33, 48_000, 0.94, 131, 0.0), ("agentx", 43, 142_000, 0.96, 260, 0.44)],
)
def test_presets_have_the_figures_of_the_traces(
    preset: str, turns: int, prompt: int, seen: float, in_for_out: int, with_subagents: float
) -> None:
    spec = replace(PRESETS[preset], sessions=300)
    trace = draw(spec, 0, STEP_TIME)
    main = [turn for turn in trace.turns if turn.parent is None]
    lengths = sorted(turn.prompt_tokens for turn in main)
    num_turns = np.unique([turn.session for turn in main], return_counts=True)[1]
    computed = ideal(trace, 16)
    outputs = sum(turn.output_tokens for turn in trace.turns)
    parents = {turn.parent for turn in trace.turns} - {None}
    assert np.median(num_turns) == pytest.approx(turns, rel=0.15)
    assert np.median(lengths) == pytest.approx(prompt, rel=0.15)
    was_seen = 1 - computed.num_computed_tokens / computed.num_prompt_tokens
    assert was_seen == pytest.approx(seen, abs=0.03)
    assert computed.num_prompt_tokens / outputs == pytest.approx(in_for_out, rel=0.2)
    assert len(parents) / len(num_turns) == pytest.approx(with_subagents, abs=0.08)
    assert lengths[-1] <= spec.max_tokens


def test_a_seed_draws_the_same_trace_again_and_another_seed_does_not() -> None:
    first, again, other = (draw(small("agentx"), seed, STEP_TIME) for seed in (1, 1, 2))
    assert first == again != other
    texts, longer = Texts(1), Texts(1)
    longer.of(5, 1000)
    assert (texts.of(5, 10) == longer.of(5, 10)).all(), "a text depends on how it was asked for"


def test_a_prompt_is_the_one_before_with_its_answer_and_what_is_new() -> None:
    lengths = {"first_tokens": LogNormal(20), "new_tokens": LogNormal(20, 0.5, 40)}
    spec = replace(small("agentx"), output_tokens=LogNormal(4, 0.5, 9), **lengths)
    trace = draw(replace(spec, max_tokens=300), 0, STEP_TIME)
    texts, before = Texts(0), dict[int, np.ndarray]()  # type: ignore[type-arg]
    num_compacted = 0
    for each in trace.turns:
        prompt = texts.prompt(each)
        if (said := before.get(each.session)) is not None:
            is_longer = len(prompt) > len(said)
            num_compacted += not is_longer
            assert not is_longer or (prompt[: len(said)] == said).all()
        before[each.session] = np.concatenate([prompt, texts.output(each)])
    assert num_compacted, "no session grew so long that it was compacted"


def test_a_parent_awaits_its_subagent_and_turns_await_the_turn_before() -> None:
    trace = draw(small("agentx"), 0, STEP_TIME)
    last = dict[int, int]()
    subagents = 0
    for number, each in enumerate(trace.turns):
        assert all(followed < number for followed in each.follows)
        if each.session in last:
            assert last[each.session] in each.follows
        subagents += len(each.follows) > 1
        last[each.session] = number
    assert subagents


def test_a_turn_comes_a_pause_after_the_last_end_that_it_awaits() -> None:
    arrivals = [
        Arrival(1.0, 4, 1),
        Arrival(2.0, 4, 1),
        Arrival(3.0, 4, 1, follows=(0, 1), pause_s=0.5),
    ]
    coming = Coming(arrivals)
    assert [number for number, _ in coming.take(5.0)] == [0, 1]
    coming.ended(0, 6.0)
    assert coming.next_s is None
    assert len(coming) == 1
    coming.ended(1, 7.0)
    assert not coming.take(7.0)
    ((number, arrival),) = coming.take(8.0)
    assert (number, arrival.arrival_s, len(coming)) == (2, 7.5, 0)


# --- bounds --------------------------------------------------------------------------------------


def test_the_optimum_keeps_what_is_read_next_where_lru_keeps_nothing() -> None:
    trace = in_turns(0, 1, 2, 0, 1, 2, 0, 1, 2)
    # A found prompt of two blocks leaves the last one to compute; its answer has no full block.
    assert ideal(trace, 4).num_computed_tokens == 3 * 8 + 6 * 4
    assert replay(trace, 4, 4, Evict.OLDEST).num_computed_tokens == 9 * 8
    # Room for two of three texts: 0 and 1 hit, then one of each three is computed.
    assert replay(trace, 4, 4, Evict.FARTHEST).num_computed_tokens == 3 * 8 + 3 * 8 + 3 * 4


def test_the_beginning_that_all_sessions_share_goes_last() -> None:
    shared = PromptPiece(9, 8)
    turns = [turn(text, shared, PromptPiece(text, 8)) for text in (0, 1, 2)]
    computed = replay(SessionTrace(turns, 0), 4, 4, Evict.OLDEST)
    assert computed.num_computed_tokens == 16 + 8 + 8


@pytest.mark.parametrize("preset", list(PRESETS))
@pytest.mark.parametrize("seed", range(3))
def test_a_larger_pool_and_foresight_never_compute_more(preset: str, seed: int) -> None:
    trace = draw(PRESETS[preset].scaled(16), seed, STEP_TIME)
    least = ideal(trace, 16).num_computed_tokens
    need = trace.most_alive_tokens // 16
    before = None
    for ratio in (8, 4, 2, 1):
        optimum, lru = (
            replay(trace, 16, need // ratio, evict).num_computed_tokens
            for evict in (Evict.FARTHEST, Evict.OLDEST)
        )
        assert least <= optimum <= lru
        assert before is None or optimum <= before
        before = optimum
    assert replay(trace, 16, need + 1, Evict.FARTHEST).num_computed_tokens == least


# --- the production core -------------------------------------------------------------------------


@pytest.mark.parametrize("preset", list(PRESETS))
def test_with_room_for_all_the_core_computes_each_token_once(preset: str) -> None:
    trace = draw(small(preset), 0, STEP_TIME)
    num_blocks = sum(t.prompt_tokens + t.output_tokens for t in trace.turns) // 4
    served = serve(trace, replace(CONFIG, num_blocks=num_blocks), STEP_TIME, lookahead=1)
    assert served.num_prefill_tokens == ideal(trace, 4).num_computed_tokens
    assert all(
        o.num_tokens == t.output_tokens for o, t in zip(served.outcomes, trace.turns, strict=True)
    )


def test_where_no_turn_waits_the_core_computes_what_plain_lru_does() -> None:
    spec = small("codex", tool_pause_s=LogNormal(60, 1.0))
    trace = draw(spec, 0, STEP_TIME)
    num_blocks = trace.most_alive_tokens // 4 // 2
    served = serve(trace, replace(CONFIG, num_blocks=num_blocks + 1), STEP_TIME, lookahead=1)
    plain = replay(trace, 4, num_blocks, Evict.OLDEST).num_computed_tokens
    assert served.max_waiting <= 1
    assert served.num_prefill_tokens == pytest.approx(plain, rel=0.05)


@pytest.mark.parametrize(
    ("preset", "ratio"), [("codex", 1), ("codex", 2), ("agentx", 2), ("agentx", 4)]
)
def test_by_sessions_the_core_computes_less_where_turns_wait(preset: str, ratio: int) -> None:
    changes = {"sessions": 24, "concurrency": 12, "turns": LogNormal(12, 0.4, 24)}
    spec = replace(PRESETS[preset].scaled(128), **changes)
    slow = StepTime(0.128, 4e-3, 0.0)
    trace = draw(spec, 0, slow)
    config = replace(CONFIG, num_blocks=trace.most_alive_tokens // 4 // ratio + 1)
    lru, sessions = (
        serve(trace, replace(config, cache_policy=policy), slow, lookahead=1)
        for policy in CachePolicy
    )
    least = ideal(trace, 4).num_computed_tokens
    assert sessions.num_prefill_tokens <= lru.num_prefill_tokens
    if ratio > 1:
        assert lru.max_waiting > 2, "no turn waited"
        excess = sessions.num_prefill_tokens - least
        assert excess <= 0.8 * (lru.num_prefill_tokens - least)
        assert sessions.duration_s < lru.duration_s
    ended = [outcome.num_tokens for outcome in sessions.outcomes]
    assert ended == [turn.output_tokens for turn in trace.turns]


# --- the command ---------------------------------------------------------------------------------


def test_the_command_prints_each_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(asdict(small("agentx")) | {"tool_pause_s": 2}, default=str))
    words = ["--sessions", str(path), "--block-size", "4", "--max-num-seqs", "8"]
    assert simulate.main([*words, "--need-over-pool", "0.1", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    boundless, half = told["pools"]
    assert boundless["computed"] == boundless["optimum"] == boundless["plain_lru"] == 1
    assert 1 < half["optimum"] < half["computed"]
    assert simulate.main([*words, "--num-blocks", "1000"]) == 0
    assert "need/pool" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("told", "names"),
    [
        ({"preset": "codex", "turns": -1}, "median -1"),
        ({"preset": "codex", "sessions": 0}, "sessions is 0"),
        ({"preset": "codex", "sessions": 1.5}, "sessions is 1.5"),
        ({"preset": "codex", "person_share": 2}, "person_share is 2"),
        ({"preset": "codex", "max_tokens": 9_000}, "max_tokens is 9000"),
        ({"preset": "codex", "pauses": 3}, "'pauses'"),
        ({"preset": "coder"}, "'coder'"),
        ({"sessions": 3}, "no concurrency"),
        ([], "expected an object"),
    ],
)
def test_a_bad_spec_is_refused_by_its_field(tmp_path: Path, told: object, names: str) -> None:
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(told))
    with pytest.raises(BadSpec, match=names):
        read_spec(str(path))


@pytest.mark.parametrize(
    "words",
    [
        ["--rate", "3"],
        ["--ttft-p99-s", "1"],
        ["--scale", "0"],
        ["--need-over-pool", "0"],
        ["--target-itl-ms", "5"],
    ],
)
def test_options_without_an_effect_on_sessions_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        simulate.main(["--sessions", "codex", *words])
    assert words[0] in capsys.readouterr().err


@pytest.mark.parametrize("policy", list(CachePolicy))
def test_with_a_tier_what_the_pool_drops_is_copied_back(policy: CachePolicy) -> None:
    spec = small("codex", tool_pause_s=LogNormal(60, 1.0))
    trace = draw(spec, 0, STEP_TIME)
    num_blocks = trace.most_alive_tokens // 4 // 2
    config = replace(CONFIG, num_blocks=num_blocks + 1, cache_policy=policy)
    tiered = replace(config, num_tier_blocks=8 * num_blocks)
    least = ideal(trace, 4).num_computed_tokens
    without, quick, slow = (
        serve(trace, one, STEP_TIME, lookahead=1, tier_s_per_block=s_per_block)
        for one, s_per_block in ((config, 0.0), (tiered, 1e-5), (tiered, 0.5))
    )
    excess = without.num_prefill_tokens - least
    # Of an answer's blocks the tier has none before the next turn has come.
    num_answered = sum(turn.output_tokens + 4 for turn in trace.turns)
    assert quick.num_prefill_tokens - least <= min(num_answered, 0.7 * excess)
    assert slow.duration_s > quick.duration_s, "a copy takes no time"
    for served in (without, quick, slow):
        ended = [outcome.num_tokens for outcome in served.outcomes]
        assert ended == [turn.output_tokens for turn in trace.turns]
