"""When a lost worker counts as dead before it has answered, and when it does not."""

import pytest

from scheduler_svc.worker import verdict
from scheduler_svc.worker.link import LinkLost
from scheduler_svc.worker.verdict import LossVerdict
from wire.deaths import PeerLoss

REFUSED = LinkLost("failed to connect", is_unreached=True)
LATE = LinkLost("DEADLINE_EXCEEDED")
LOADING = LinkLost("it is not ready: loading", PeerLoss.DEATH)


def opened(*, has_others: bool) -> LossVerdict:
    made = LossVerdict(lambda: has_others)
    made.begin("UNAVAILABLE: Socket closed")
    return made


def test_the_only_worker_is_waited_for_however_long_it_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verdict, "LONGEST_S", 0.0)
    alone = opened(has_others=False)
    assert not alone.is_death_by(REFUSED) and not alone.is_death_by(LATE)


def test_where_others_can_go_on_a_place_without_a_process_is_a_death() -> None:
    one_of_several = opened(has_others=True)
    assert one_of_several.is_death_by(REFUSED)
    assert not one_of_several.is_death_by(LATE), "for a moment it may only be out of reach"


def test_where_others_can_go_on_silence_is_a_death_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verdict, "LONGEST_S", 0.0)
    assert opened(has_others=True).is_death_by(LATE)


@pytest.mark.parametrize("has_others", [True, False])
def test_a_process_that_is_not_ready_is_another_one(has_others: bool) -> None:
    assert opened(has_others=has_others).is_death_by(LOADING)


def test_what_is_known_is_not_judged_again() -> None:
    known = opened(has_others=True)
    known.end()
    assert not known.is_open and not known.is_death_by(REFUSED)
