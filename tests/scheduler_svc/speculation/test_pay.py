"""Drafts are as long as measured steps and past drafts say that they pay."""

import pytest

from scheduler_svc.speculation.pay import Batch, BestLength, StepCosts, best_choice


def costs(**seconds: float) -> StepCosts:
    measured = StepCosts()
    for size, value in seconds.items():
        measured.observe(int(size.removeprefix("of_")), value)
    return measured


def test_nothing_is_drafted_before_a_step_was_measured() -> None:
    assert best_choice(Batch(1, 1, 1.0), 4, StepCosts()).length == 0


def test_drafts_that_come_true_are_as_long_as_allowed_where_tokens_are_free() -> None:
    assert best_choice(Batch(1, 1, 0.9), 4, costs(of_1=1.0, of_5=1.1)).length == 4


def test_drafts_that_fail_are_not_made() -> None:
    assert best_choice(Batch(1, 1, 0.2), 4, costs(of_1=1.0, of_2=1.3, of_5=1.6)).length == 0


def test_longer_drafts_come_with_better_ones() -> None:
    steep = costs(of_1=1.0, of_2=1.2, of_3=1.5, of_4=2.2, of_5=3.0)
    lengths = [best_choice(Batch(1, 1, p / 10), 4, steep).length for p in (1, 5, 9)]
    assert lengths == sorted(lengths) and lengths[0] == 0 < lengths[1] < lengths[2]


def test_a_large_batch_drafts_nothing_where_its_tokens_cost() -> None:
    linear = costs(of_1=1.0, of_8=1.1, of_16=1.2, of_64=4.0, of_320=20.0)
    assert best_choice(Batch(1, 1, 0.6), 4, linear).length > 0
    assert best_choice(Batch(64, 64, 0.6), 4, linear).length == 0


def test_what_it_takes_to_make_drafts_counts() -> None:
    free = costs(of_1=1.0, of_5=1.0)
    lengths = [best_choice(Batch(1, 1, 0.8), 4, free, one).length for one in (0.0, 0.4, 1.0)]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] == 4 and lengths[2] == 0
    assert best_choice(Batch(1, 1, 1.0), 4, free, 0.25) == BestLength(4, pytest.approx(0.6))


def test_rows_that_draft_among_others_await_every_other_step() -> None:
    free = costs(of_1=1.0, of_20=1.0)
    assert best_choice(Batch(8, 8, 0.5), 1, free).length == 1
    assert best_choice(Batch(8, 1, 0.5), 1, free).length == 0  # 1.5 tokens in the time of two steps
    assert best_choice(Batch(8, 1, 0.9), 4, free).length == 4


def test_costs_lie_between_those_measured() -> None:
    measured = costs(of_2=1.0, of_6=3.0)
    assert measured.of(4) == pytest.approx(2.0)
    assert (measured.of(1), measured.of(9)) == (1.0, 3.0)
    assert measured.fewest == 2
    measured.observe(2, 2.0)
    assert measured.of(2) == pytest.approx(1.1)
    measured.observe_best(2, 0.5)
    assert measured.of(2) == pytest.approx(0.5)
    measured.observe_best(2, 1.5)
    assert measured.of(2) == pytest.approx(0.6)
