"""Overload: limits of the queue, reservations, and which requests are accepted."""

import pytest

from scheduler_svc.core import RefusalKind, Refused, Scheduler
from scheduler_svc.core.queue.reservations import GRACE_S, LEAD_S, Reservations
from scheduler_svc.core.request.config import Policy
from tests.scheduler_svc.core.builders import make_request, make_scheduler, plan_step


def full(limit: int = 4, **limits: object) -> Scheduler:
    """A scheduler with one running request and a full queue."""
    scheduler = make_scheduler(max_num_seqs=1, max_waiting_requests=limit, **limits)
    scheduler.add(make_request("runs", 2, max_tokens=9))
    plan_step(scheduler)
    for index in range(limit):
        scheduler.add(make_request(f"w{index}", 2, max_tokens=9))
    return scheduler


def refused(scheduler: Scheduler, request_id: str, now_s: float = 0.0, **rest: object) -> str:
    with pytest.raises(Refused) as caught:
        scheduler.add(make_request(request_id, 2, max_tokens=2, arrival_s=now_s, **rest))
    assert caught.value.kind is RefusalKind.OVERLOADED
    return str(caught.value)


def test_a_full_queue_refuses_and_keeps_nothing() -> None:
    scheduler = full()
    assert "4 requests wait, at most 4 may" in refused(scheduler, "x")
    assert scheduler.find("x") is None
    assert scheduler.num_waiting == 4
    assert scheduler.intake.num_refused == 1


def test_one_tenant_cannot_fill_the_queue_of_all() -> None:
    scheduler = make_scheduler(max_num_seqs=1, max_waiting_requests_per_tenant=2)
    for index in range(3):
        scheduler.add(make_request(f"x{index}", 2, tenant="x"))
        if not index:
            plan_step(scheduler)
    assert "of tenant 'x'" in refused(scheduler, "x3", tenant="x")
    scheduler.add(make_request("y", 2, tenant="y"))


def test_a_tenant_with_nothing_in_a_full_queue_has_a_place_until_twice_as_many_wait() -> None:
    scheduler = full(4, policy=Policy.FAIR)
    for index in range(4):
        assert "at most 4 may" in refused(scheduler, "more")
        scheduler.add(make_request(f"y{index}", 2, tenant=f"t{index}"))
        assert "wait" in refused(scheduler, "second", tenant=f"t{index}")
    assert "8 requests wait, at most 8 may" in refused(scheduler, "x", tenant="another")
    assert "at most 4 may" in refused(full(4), "x", tenant="another")  # first come first served


def test_a_place_that_was_promised_is_kept_for_its_request() -> None:
    scheduler = full(4)
    refused(scheduler, "early")
    scheduler.intake.reservations.make(make_request("early", 2), due_s=5.0)
    scheduler.abort("w0")
    assert "reserved" in refused(scheduler, "late", now_s=5.0)
    scheduler.add(make_request("early", 2, max_tokens=2, arrival_s=5.0))
    assert scheduler.num_waiting == 4
    assert len(scheduler.intake.reservations) == 0


def test_a_place_is_kept_only_around_its_time() -> None:
    for now_s in (5.0 - LEAD_S - 0.01, 5.0 + GRACE_S + 0.01):
        scheduler = full(4)
        scheduler.intake.reservations.make(make_request("early", 2), due_s=5.0)
        scheduler.abort("w0")
        scheduler.add(make_request("late", 2, max_tokens=2, arrival_s=now_s))


def test_promises_that_nobody_keeps_never_take_more_than_half_of_the_queue() -> None:
    scheduler = full(4)
    for index in range(50):
        scheduler.intake.reservations.make(make_request(f"never {index}", 2), due_s=1.0)
    for index in range(3):
        scheduler.abort(f"w{index}")
    scheduler.add(make_request("a", 2, max_tokens=2, arrival_s=1.0))
    refused(scheduler, "b", now_s=1.0)
    assert scheduler.num_waiting == 2


def test_a_promise_is_no_ticket_before_its_time_or_past_a_full_queue() -> None:
    scheduler = full(4)
    scheduler.intake.reservations.make(make_request("early", 2), due_s=5.0)
    refused(scheduler, "early", now_s=3.0)
    refused(scheduler, "early", now_s=5.0)
    scheduler.abort("w0")
    scheduler.add(make_request("early", 2, max_tokens=2, arrival_s=5.1))


def test_the_books_of_promises_return_to_zero() -> None:
    reservations = Reservations()
    for index in range(100):
        request = make_request(f"r{index % 60}", 1 + index % 7, tenant="ab"[index % 2])
        reservations.make(request, due_s=index / 10)
        reservations.advance(index / 20)
        if index % 3 == 0:
            reservations.keep(f"r{index % 60}")
        assert reservations.due.num_sequences == sum(
            reservations.due_of(tenant).num_sequences for tenant in "ab"
        )
    reservations.advance(1000.0)
    assert (len(reservations), reservations.due.num_sequences, reservations.due.num_tokens) == (
        0,
        0,
        0,
    )


def test_a_promise_made_twice_for_the_same_moment_keeps_one_place() -> None:
    reservations = Reservations()
    for _ in range(2):
        reservations.make(make_request("x", 3), due_s=5.0)
    reservations.advance(5.0)
    assert (reservations.due.num_sequences, reservations.due.num_tokens) == (1, 3)
    reservations.keep("x")
    assert reservations.due.num_sequences == 0


def test_who_is_refused_hears_how_many_go_first() -> None:
    scheduler = full(4)
    request = make_request("x", 2, max_tokens=2)
    assert scheduler.intake.num_ahead(request) == 1
    scheduler.intake.reservations.make(make_request("y", 2), due_s=3.0)
    assert scheduler.intake.num_ahead(request) == 2


def test_a_deadline_that_has_passed_is_refused_as_such() -> None:
    scheduler = make_scheduler()
    with pytest.raises(Refused) as caught:
        scheduler.add(make_request("x", 2, arrival_s=5.0, deadline_s=5.0))
    assert caught.value.kind is RefusalKind.EXPIRED
