"""The drafts of a step are chosen together, and no row pays for others' without end."""

import numpy as np

from scheduler_svc.speculation.lengths import DraftableRows, choose_lengths
from scheduler_svc.speculation.prices import StepPrices

# Of 8B on an H200 with 64 rows: a row or a draft takes 0.033 ms, and to await drafts 0.9 ms.
PRICES = StepPrices(6.3e-3, 0.033e-3, 4.2e-3, 0.9e-3, 0.033e-3)
RICH_S = 1.0
PLACES = np.arange(1, 8)


def lengths(
    probabilities: list[float],
    left_s: list[float] | None = None,
    max_drafts: int = 192,
    prices: StepPrices = PRICES,
) -> list[int]:
    """Lengths of rows with predictions of these probabilities; more rows have so much left."""
    gains = np.array(probabilities)[:, None] ** PLACES
    left = left_s or [RICH_S] * len(probabilities)
    chosen: list[int] = choose_lengths(
        DraftableRows(gains, np.array(left), max_drafts), prices
    ).tolist()
    return chosen


def test_alike_rows_share_the_places_of_a_step() -> None:
    assert lengths([0.9] * 64) == [3] * 64


def test_likely_drafts_come_before_unlikely_ones() -> None:
    chosen = lengths([0.97] * 20 + [0.6] * 44)
    assert chosen[:20] == [7] * 20
    assert max(chosen[20:]) <= 2 and sum(chosen) <= 192


def test_drafts_end_where_they_bring_less_than_they_take() -> None:
    dear = StepPrices(6.3e-3, 0.03e-3, 4.4e-3, 0.0, 0.08e-3)
    few, many = lengths([0.9] * 64, prices=dear), lengths([0.9] * 64)
    assert 0 < max(few) < max(many)


def test_nothing_is_drafted_where_nothing_pays() -> None:
    assert (
        lengths([0.5] * 64, prices=StepPrices(6.3e-3, 0.03e-3, 4.4e-3, 5e-3, 0.06e-3)) == [0] * 64
    )


def test_no_more_drafts_than_there_are_places_for() -> None:
    assert sum(lengths([0.97] * 64, max_drafts=50)) <= 50
    assert lengths([0.97] * 64, max_drafts=0) == [0] * 64
    assert lengths([0.97] * 64, max_drafts=-3) == [0] * 64


def test_a_row_alone_drafts_from_the_start() -> None:
    alone = StepPrices(4.0e-3, 0.0, 4.0e-3, 1.3e-3, 0.03e-3)
    assert lengths([0.9], [0.0], prices=alone) == [7]


def test_a_row_without_drafts_that_may_lose_nothing_keeps_others_from_them() -> None:
    others = [0.9] * 63
    assert sum(lengths(others, [RICH_S] * 64)) > 150
    assert sum(lengths(others, [RICH_S] * 63 + [0.0])) == 0
    assert sum(lengths(others, [RICH_S] * 63 + [0.1e-3])) == 0
    assert sum(lengths(others, [RICH_S] * 63 + [4e-3])) > 150


def test_a_row_that_may_lose_nothing_gets_drafts_of_its_own_first() -> None:
    poor = [RICH_S] * 63 + [0.0]
    chosen = lengths([0.99] * 63 + [0.7], poor)
    assert chosen[-1] >= 1 and sum(chosen) > 150


def test_rows_that_are_far_too_late_are_not_made_later_by_a_hope() -> None:
    assert sum(lengths([0.9] * 64, [-1e-3] * 64)) > 150
    assert sum(lengths([0.9] * 64, [-50e-3] + [RICH_S] * 63)) == 0


def test_lost_is_what_a_step_takes_beyond_a_plain_one_of_as_many_tokens() -> None:
    """Drafts that all come true, and are not awaited, cost others nothing."""
    free = StepPrices(6.3e-3, 0.033e-3, 4.2e-3, 0.0, 0.033e-3)
    assert sum(lengths([1.0] * 27, [0.0] * 64, prices=free)) == 27 * 7
