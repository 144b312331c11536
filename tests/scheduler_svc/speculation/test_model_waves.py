"""Requests that come at once, and a draft model that is right for some and wrong for others."""

import numpy as np
import pytest

from scheduler_svc.core import Drafts, StepPlan
from scheduler_svc.speculation.model_drafter import ModelDrafter
from scheduler_svc.speculation.start import Drafting
from tests.scheduler_svc.speculation.virtual_server import (
    OPTIONS,
    Server,
    foreseen,
    gains,
    in_passages,
)

# What a pass of a draft model of 135M takes by its tokens.
POSITIONS, MILLISECONDS = (1, 4, 16, 64, 256, 1024, 4096), (0.42, 0.65, 1.0, 1.2, 1.6, 3.0, 9.0)


class ModelServer(Server):
    """Its worker drafts, and reads before what it has not read of a request."""

    def make_drafter(self) -> Drafting:
        self.num_read: dict[str, int] = {}  # by request
        return ModelDrafter(OPTIONS, self.core)

    def drafts_of(self, plan: StepPlan) -> Drafts:
        found = {}
        for slot, draft in plan.drafts.items():
            sequence = self.core.view.sequence_in(slot)
            assert sequence is not None
            num_known = self.core.view.num_tokens(sequence)
            found[slot] = self._predict(sequence, num_known)[: len(draft)]
        return found

    def draft_s(self, plan: StepPlan) -> float:
        num_read = 0
        for slot, draft in plan.drafts.items():
            sequence = self.core.view.sequence_in(slot)
            assert sequence is not None
            name, num_known = sequence.request.request_id, self.core.view.num_tokens(sequence)
            num_read += max(num_known - self.num_read.get(name, 0), 1)
            self.num_read[name] = num_known + len(draft) - 1  # or fewer: it is read again
        seconds = pass_s(num_read)
        lengths = np.array([len(draft) for draft in plan.drafts.values()])
        for place in range(1, int(lengths.max())):
            seconds += pass_s(int(np.count_nonzero(lengths > place)))
        return seconds


def pass_s(num_tokens: int) -> float:
    return float(np.interp(num_tokens, POSITIONS, MILLISECONDS)) * 1e-3


@pytest.mark.parametrize("num_rows", [1, 8, 64])
@pytest.mark.parametrize("right", [0.5, 0.7])
def test_drafts_that_hardly_pay_make_no_request_slower(num_rows: int, right: float) -> None:
    assert min(gains(foreseen(num_rows, 1.0, right), num_rows, ModelServer)) >= 0.97


@pytest.mark.parametrize(
    ("num_rows", "right", "gain"),
    [
        (1, 0.9, 1.9),
        (1, 0.97, 2.8),
        (8, 0.9, 1.7),
        (8, 0.97, 2.2),
        (64, 0.9, 1.15),
        (64, 0.97, 1.3),
    ],
)
def test_a_model_that_is_mostly_right_makes_all_quicker(
    num_rows: int, right: float, gain: float
) -> None:
    assert min(gains(foreseen(num_rows, 1.0, right), num_rows, ModelServer)) > gain


@pytest.mark.parametrize(("right", "gain"), [(0.7, 0.97), (0.9, 1.15), (0.97, 1.3)])
def test_waves_that_follow_each_other_are_quicker_or_as_quick(right: float, gain: float) -> None:
    assert gains(foreseen(256, 1.0, right), 64, ModelServer)[-1] >= gain


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("right", [0.7, 0.97])
def test_no_request_is_much_slower_for_others_drafts(share: float, right: float) -> None:
    assert min(gains(foreseen(64, share, right), 64, ModelServer)) >= 0.97


@pytest.mark.parametrize("lengths", [(30, 10), (20, 20), (10, 30)])
def test_requests_that_are_foreseen_in_part_are_no_slower(lengths: tuple[int, int]) -> None:
    assert min(gains(in_passages(64, *lengths), 64, ModelServer)) >= 0.97
