"""Requests that come at once, some foreseen and some not: none is made slower by others' drafts."""

import pytest

from tests.scheduler_svc.speculation.virtual_server import foreseen, gains, in_passages


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("right", [0.7, 0.97])
def test_in_one_wave_no_request_is_slower_for_others_drafts(share: float, right: float) -> None:
    assert min(gains(foreseen(64, share, right), 64)) >= 0.97


def test_drafts_that_hardly_pay_make_no_request_slower() -> None:
    assert min(gains(foreseen(64, 1.0, 0.7), 64)) >= 0.97


@pytest.mark.parametrize("lengths", [(30, 10), (20, 20), (10, 30)])
def test_requests_that_are_foreseen_in_part_are_no_slower(lengths: tuple[int, int]) -> None:
    assert min(gains(in_passages(64, *lengths), 64)) >= 0.97


@pytest.mark.parametrize(("right", "gain"), [(0.75, 1.0), (0.9, 1.3), (0.97, 1.5)])
def test_a_wave_that_is_all_foreseen_is_quicker(right: float, gain: float) -> None:
    assert min(gains(foreseen(64, 1.0, right), 64)) > gain


@pytest.mark.parametrize("share", [0.2, 0.8])
def test_waves_that_follow_each_other_are_no_slower(share: float) -> None:
    assert gains(foreseen(256, share, 0.9), 64)[-1] >= 0.97


@pytest.mark.parametrize(("num_rows", "gain"), [(1, 3.0), (8, 2.5)])
def test_few_rows_that_are_foreseen_gain_most(num_rows: int, gain: float) -> None:
    assert min(gains(foreseen(num_rows, 1.0, 0.9), num_rows)) > gain


@pytest.mark.parametrize("num_rows", [1, 8, 64])
def test_what_is_not_foreseen_is_no_slower(num_rows: int) -> None:
    assert min(gains(foreseen(num_rows, 0.0, 0.9), num_rows)) >= 0.97
