"""A short soak on real processes, and the checks that it ends with."""

import random
from typing import Any

import pytest

from tests.e2e.soak.__main__ import soak
from tests.e2e.soak.clients import AnswerCut, SoakAnswer
from tests.e2e.soak.run import Soak, SoakOptions, SoakOutcome
from tests.e2e.soak.wishes import KINDS, draw


def test_a_seed_draws_the_same_requests_of_every_kind() -> None:
    wishes = draw(16, 1)
    assert wishes == draw(16, 1) != draw(16, 2)
    assert {wish.kind for wish in wishes} == set(KINDS)


class FakeProduct:
    """A product with the given counters; it answers nothing."""

    ports: Any = type("Ports", (), {"gateway_http": 0, "gateway_grpc": 0})

    def __init__(self, num_free_blocks: int = 8) -> None:
        counters = {"num_running": 0, "num_waiting": 0, "num_blocks": 8}
        self.counters = type("Status", (), counters | {"num_free_blocks": num_free_blocks})

    def status(self) -> Any:
        return self.counters


def outcome_after(what: Any, num_free_blocks: int = 8, minutes: float = 20) -> SoakOutcome:
    options = SoakOptions(minutes, kills_per_minute=0)
    run: Any = Soak(FakeProduct(num_free_blocks), options, print)  # type: ignore[arg-type]
    what(run)
    outcome: SoakOutcome = run.outcome
    return outcome


def test_an_answer_that_differs_from_its_twin_is_a_problem() -> None:
    wish, twin = draw(1, 0)[0], SoakAnswer(("abc",), is_whole=True)
    for texts, is_whole, is_right in (
        (("abc",), True, True),
        (("abd",), True, False),
        (("ab",), True, False),
        (("ab",), False, True),
        (("b",), False, False),
    ):
        answer = SoakAnswer(texts, is_whole)
        outcome = outcome_after(lambda run, answer=answer: run._compare(wish, "http", answer, twin))
        assert (not outcome.problems) == is_right, texts


def test_a_request_that_fails_without_a_kill_is_a_problem() -> None:
    wish = draw(1, 0)[0]
    outcome = outcome_after(lambda run: run._count_cut(wish, "http", 1e9, AnswerCut("reset")))
    assert outcome.problems and not outcome.num_cut


def test_blocks_that_stay_held_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.e2e.soak.run.IDLE_WITHIN_S", 0.0)
    assert not outcome_after(lambda run: run._check_idle()).problems
    assert "1 blocks" in outcome_after(lambda run: run._check_idle(), num_free_blocks=7).problems[0]


def test_memory_that_grows_after_the_tenth_minute_is_a_problem() -> None:
    def grown(run: Any, most: float) -> None:
        sizes = [100.0, 200.0, 201.0, most]
        minutes = (0.0, 10.0, 15.0, 19.9)
        pairs = zip(minutes, sizes, strict=True)
        run.outcome.rss_mib = [(minute, {"worker": size}) for minute, size in pairs]
        run._check_memory()

    assert not outcome_after(lambda run: grown(run, 205.0)).problems
    assert outcome_after(lambda run: grown(run, 230.0)).problems


def test_memory_of_a_run_that_is_over_soon_is_not_judged() -> None:
    def grown(run: Any) -> None:
        minutes = run._options.minutes
        run.outcome.rss_mib = [(minutes / 2, {"worker": 100.0}), (minutes, {"worker": 200.0})]
        run._check_memory()

    assert not outcome_after(grown, minutes=0.5).problems
    assert outcome_after(grown, minutes=1).problems


@pytest.mark.slow
def test_every_answer_under_load_is_that_of_its_twin() -> None:
    chosen = SoakOptions(
        minutes=0.1, seed=random.Random(1).randrange(9), num_wishes=16, kills_per_minute=0
    )
    outcome = soak(chosen)
    assert not outcome.problems
    assert outcome.num_whole.total() > 0
