"""Core, drafter and a runner with a draft model: outputs are those without, token for token."""

from pathlib import Path

import pytest

from scheduler_svc.core import Preemption
from scheduler_svc.speculation.options import Method, SpeculationOptions
from tests.e2e.speculation.cases import FEW, REPEATING, add_all, check, save_model
from tests.e2e.speculation.joined import Joined, Told

OPTIONS = SpeculationOptions(Method.DRAFT_MODEL, 4)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Smaller, with other weights: it is right now and then."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return save_model(tmp_path_factory.mktemp("models") / "other", **sizes)


def drafting(folder: Path, draft_folder: Path, **more: object) -> Joined:
    joined = Joined(folder, OPTIONS, draft_folder=draft_folder, **more)  # type: ignore[arg-type]
    add_all(joined)
    return joined


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_draft_model_changes_no_output(
    folder: Path, other: Path, told_without: dict[int, Told], lookahead: int
) -> None:
    joined = drafting(folder, other, lookahead=lookahead)
    check(joined.run(), told_without)
    counters = joined.core.counters
    assert 0 < counters.num_accepted_tokens < counters.num_drafted_tokens
    assert joined.core.view.num_free_blocks == joined.core.view.num_blocks


def test_all_drafts_of_the_same_model_come_true(
    folder: Path, told_without: dict[int, Told]
) -> None:
    joined = drafting(folder, folder)
    check(joined.run(), told_without)
    counters = joined.core.counters
    assert counters.num_accepted_tokens == counters.num_drafted_tokens > 0


def test_the_same_model_brings_one_token_more_than_it_drafts_a_step(folder: Path) -> None:
    joined = Joined(folder, OPTIONS, draft_folder=folder, lookahead=0)
    joined.add(REPEATING, temperature=1.0, seed=4, ignore_eos=True, max_tokens=27)
    joined.run()
    # One for the prompt, one to measure what a step takes, and five steps of five tokens.
    assert joined.num_steps == 7
    assert joined.core.counters.num_drafted_tokens == 20


@pytest.mark.parametrize("preemption", list(Preemption))
def test_a_draft_model_changes_no_output_where_blocks_are_short(
    folder: Path, other: Path, told_without: dict[int, Told], preemption: Preemption
) -> None:
    host = {"num_host_blocks": 40} if preemption is Preemption.SWAP else {}
    joined = drafting(folder, other, num_blocks=14, preemption=preemption, **host)
    check(joined.run(), told_without)
    assert joined.core.view.num_preemptions and joined.core.counters.num_accepted_tokens


@pytest.mark.parametrize("preemption", list(Preemption))
def test_what_moves_is_still_known_to_the_draft_model(folder: Path, preemption: Preemption) -> None:
    host = {"num_host_blocks": 40} if preemption is Preemption.SWAP else {}
    joined = drafting(folder, folder, num_blocks=14, preemption=preemption, **host)
    joined.run()
    counters = joined.core.counters
    assert joined.core.view.num_preemptions
    assert counters.num_accepted_tokens == counters.num_drafted_tokens > 0


def test_a_draft_model_changes_no_output_when_workers_die(
    folder: Path, other: Path, told_without: dict[int, Told]
) -> None:
    joined = drafting(folder, other)
    for num_steps in (5, 9, 17):
        joined.run(num_steps)
        joined.kill_worker()
    check(joined.run(), told_without)
    assert joined.core.counters.num_accepted_tokens


def test_a_shared_prefix_is_drafted_from(folder: Path) -> None:
    """Its blocks were filled by a request that drafted, or by one that never did."""
    joined = Joined(folder, OPTIONS, draft_folder=folder)
    sampled = {"temperature": 1.0, "allowed_token_ids": FEW, "ignore_eos": True}
    for max_tokens in (1, 12, 20):
        joined.add([*REPEATING, 50 + max_tokens], max_tokens=max_tokens, seed=3, **sampled)
        joined.run()
    counters = joined.core.counters
    assert counters.prefix_hit_tokens
    assert counters.num_accepted_tokens == counters.num_drafted_tokens > 0
