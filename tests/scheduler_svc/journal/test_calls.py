"""Every call that changes the core is recorded."""

from dataclasses import replace
from typing import Any

import pytest

from scheduler_svc.core import CachePolicy, Refused, Scheduler
from scheduler_svc.core.history.migration import Migration
from scheduler_svc.core.step.peer_moves import PeerMoves
from scheduler_svc.core.step.transfers import Transfers
from scheduler_svc.journal.calls import EVENTS, PARTS, QUESTIONS, TappedScheduler
from tests.scheduler_svc.core.builders import SMALL, make_request

KINDS = Scheduler, Migration, Transfers, PeerMoves
Told = list[tuple[str, tuple[Any, ...]]]


def tapped(**limits: object) -> tuple[TappedScheduler, Told]:
    told: Told = []

    def tap(name: str, arguments: tuple[Any, ...], answer: Any, refused: Refused | None) -> None:
        told.append((name, arguments))

    return TappedScheduler(replace(SMALL, **limits), tap), told  # type: ignore[arg-type]


def test_everything_that_a_scheduler_offers_is_an_event_or_a_question() -> None:
    offered = {name for kind in KINDS for name in dir(kind)}
    assert {name for name in offered if not name.startswith("_")} == EVENTS | QUESTIONS
    assert not EVENTS & QUESTIONS
    attributes = {name for name in vars(Scheduler(SMALL)) if not name.startswith(("_", "num_"))}
    assert attributes == PARTS


def test_every_event_is_told_by_an_override_of_its_own() -> None:
    scheduler, _ = tapped()
    parts = scheduler, scheduler.migration, scheduler.transfers, scheduler.peer_moves
    overridden = set().union(*(vars(type(part)) for part in parts))
    assert overridden >= EVENTS


def test_what_an_event_calls_itself_is_not_told_again() -> None:
    scheduler, told = tapped()
    request = make_request("a", 5, arrival_s=3.0)  # add() advances the time itself
    scheduler.add(request)
    scheduler.expire(4.0)
    assert told == [("add", (request,)), ("expire", (4.0,))]


def test_setting_the_time_is_told_and_holds() -> None:
    scheduler, told = tapped()
    scheduler.now_s = 7.0
    assert told == [("now_s", (7.0,))]
    assert scheduler.now_s == 7.0


def test_the_time_reaches_the_sessions_whose_core_is_recorded() -> None:
    scheduler, _ = tapped(cache_policy=CachePolicy.SESSIONS)
    scheduler.now_s = 7.0
    sessions = scheduler.internal_state.sessions
    assert sessions is not None and sessions.now_s == 7.0


def test_a_refusal_is_told_because_it_may_have_been_counted() -> None:
    scheduler, told = tapped(max_waiting_requests=1)
    scheduler.add(make_request("a", 5))
    with pytest.raises(Refused):
        scheduler.add(make_request("b", 5))
    assert [name for name, _ in told] == ["add", "add"]


def test_a_generator_of_ids_is_told_as_what_it_yielded() -> None:
    scheduler, told = tapped()
    scheduler.add(make_request("a", 5))
    assert len(scheduler.fail((name for name in ["a"]), "because")) == 1
    assert told[-1] == ("fail", (["a"], "because"))
