"""The number of drafts of each row of a step: chosen together, by their expected gain.

The likeliest drafts are taken, as many as bring most tokens a second; none, if that would make a
row later than drafts may make it. Knows neither requests nor tokens.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.speculation.acceptance import Gains
from scheduler_svc.speculation.pay import MARGIN
from scheduler_svc.speculation.prices import StepPrices

_RISKED = 1.0  # of a step with its drafts: so late a row may lose what it is expected to regain

Lengths = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class DraftableRows:
    """The rows of the next step, those with predictions first."""

    gains: Gains  # [R, D]: the probability that each draft is accepted, falling in each row
    left_s: NDArray[np.float64]  # [N >= R]: what drafts may cost each row
    max_drafts: int  # of all together


def choose_lengths(rows: DraftableRows, prices: StepPrices) -> Lengths:
    """The number of drafts of each row with predictions [R]; all 0 where none pay."""
    num_predicted, most = rows.gains.shape
    nothing = np.zeros(num_predicted, dtype=np.intp)
    order = _likeliest(rows, prices)
    if not len(order):
        return nothing
    accepted = np.cumsum(rows.gains.ravel()[order])  # [K], expected of the first drafts
    cost = _best(accepted, np.arange(1, len(order) + 1), len(rows.left_s), prices)
    if cost is None:
        return nothing
    lengths = np.bincount(order[: cost.num_drafts] // most, minlength=num_predicted)
    return lengths if _all_may_lose(rows, lengths, cost, prices) else nothing


def choose_rounds(rows: DraftableRows, prices: StepPrices) -> int:
    """The number of drafts that each row with predictions gets, all alike; 0 where none pay."""
    num_predicted = len(rows.gains)
    most = min(rows.gains.shape[1], rows.max_drafts // max(num_predicted, 1))
    if most < 1:
        return 0
    accepted = np.cumsum(rows.gains[:, :most].sum(axis=0))  # [most]
    num_drafts = num_predicted * np.arange(1, most + 1)
    cost = _best(accepted, num_drafts, len(rows.left_s), prices)
    if cost is None:
        return 0
    length = cost.num_drafts // num_predicted
    lengths = np.full(num_predicted, length, dtype=np.intp)
    return length if _all_may_lose(rows, lengths, cost, prices) else 0


@dataclass(frozen=True, slots=True)
class _Cost:
    """The cost of a step's drafts."""

    num_drafts: int
    extra_s: float
    accepted: float  # expected


def _best(
    accepted: NDArray[np.float64], num_drafts: Lengths, num_rows: int, prices: StepPrices
) -> _Cost | None:
    """The one of several numbers of drafts [K] that brings most tokens a second; None: none pays.

    `accepted` [K] are expected of them.
    """
    extra_s = prices.wait_s + prices.draft_s * num_drafts
    pace = (num_rows + accepted) / (prices.plain_s + extra_s)
    best = int(pace.argmax())
    if pace[best] <= MARGIN * num_rows / prices.plain_s:
        return None
    return _Cost(int(num_drafts[best]), float(extra_s[best]), float(accepted[best]))


def _likeliest(rows: DraftableRows, prices: StepPrices) -> Lengths:
    """The drafts that there may be, as indices of all gains, the likeliest first."""
    keys = -rows.gains
    # A row that may lose little gets its first draft before others get more.
    keys[rows.left_s[: len(keys)] < prices.plain_s, 0] -= 1.0
    # Stable, so that a row's drafts stay in order.
    return np.argsort(keys, axis=None, kind="stable")[: max(rows.max_drafts, 0)]


def _all_may_lose(rows: DraftableRows, lengths: Lengths, cost: _Cost, prices: StepPrices) -> bool:
    """True if each row may lose what a step loses, or is expected to regain it by its drafts."""
    lost_s = cost.extra_s - prices.row_s * cost.accepted
    risked_s = _RISKED * (prices.plain_s + cost.extra_s)
    may_s = rows.left_s.copy()
    may_s[(may_s < 0) & (may_s > -risked_s)] = 0.0
    is_drafted = np.arange(rows.gains.shape[1]) < lengths[:, None]
    may_s[: len(lengths)] += prices.fixed_s * (rows.gains * is_drafted).sum(axis=1)
    return bool(lost_s <= may_s.min())
