"""Requirements of a sequence before it enters: several, of any kind, each with its end."""

from dataclasses import replace

import pytest

from scheduler_svc.core import (
    GRAMMAR,
    FinishReason,
    Preparation,
    Preparations,
    Refused,
    Requirement,
    RequirementKind,
    Scheduler,
    Status,
)
from scheduler_svc.core.invariants import check_invariants
from tests.scheduler_svc.core.builders import (
    SMALL,
    answer,
    make_request,
    make_scheduler,
    plan_step,
    step,
)

ADAPTER = Requirement(RequirementKind.ADAPTER, "law")
PICTURES = tuple(Requirement(RequirementKind.ENCODER_OUTPUT, key) for key in ("cat", "dog"))
REMOTE = Requirement(RequirementKind.REMOTE_KV, "worker 2")
ALL = tuple(RequirementKind)


def asked(scheduler: Scheduler) -> tuple[Preparation, ...]:
    """Takes what the worker is asked for; nothing is dropped."""
    preparations = scheduler.take_preparations()
    assert preparations is not None and not preparations.dropped_ids
    return preparations.wanted


def dropped(scheduler: Scheduler) -> tuple[int, ...]:
    """Takes the ids that the worker need not keep any more."""
    preparations = scheduler.take_preparations() or Preparations((), ())
    assert not preparations.wanted
    return preparations.dropped_ids


def answer_oldest(scheduler: Scheduler) -> None:
    """Answers the oldest step in flight with one token for each row that samples."""
    plan = scheduler.oldest_in_flight
    assert plan is not None
    answer(scheduler, *[500] * len(plan.sampled_slots))


def test_a_grammar_that_proved_bad_after_its_request_ended_is_not_dropped_as_well() -> None:
    """The worker holds nothing of it any more. Seen in a soak: seed 201, episode 35."""
    scheduler = make_scheduler(prepared_kinds=(GRAMMAR.kind,))
    scheduler.add(make_request("a", 3, requirements=(GRAMMAR,)))
    (wanted,) = asked(scheduler)
    scheduler.abort("a")
    assert scheduler.prepared(wanted.preparation_id, "it cannot be followed") is None
    assert scheduler.take_preparations() is None


def test_a_sequence_enters_once_all_that_it_requires_are_ready_in_any_order() -> None:
    scheduler = make_scheduler(prepared_kinds=ALL)
    requirements = (GRAMMAR, ADAPTER, *PICTURES, REMOTE)
    sequence = scheduler.add(make_request("a", 3, requirements=requirements))
    wanted = asked(scheduler)
    assert tuple(one.requirement for one in wanted) == requirements
    for preparation in reversed(wanted):
        assert sequence.status is Status.PREPARING and scheduler.schedule() is None
        assert scheduler.prepared(preparation.preparation_id) is None
        check_invariants(scheduler)
    (entered,) = plan_step(scheduler).new_sequences
    assert entered.preparations == {one.requirement: one.preparation_id for one in wanted}
    assert sequence.preparations == {} and dropped(scheduler) == ()
    check_invariants(scheduler)


@pytest.mark.parametrize("kind", ALL)
def test_a_requirement_that_fails_ends_its_request_and_drops_the_others(
    kind: RequirementKind,
) -> None:
    scheduler = make_scheduler(prepared_kinds=ALL)
    failing = Requirement(kind, "" if kind is GRAMMAR.kind else "x")
    others = tuple(one for one in (GRAMMAR, ADAPTER, REMOTE) if one.kind is not kind)
    scheduler.add(make_request("a", 3, requirements=(*others, failing)))
    wanted = {one.requirement: one.preparation_id for one in asked(scheduler)}
    scheduler.prepared(wanted[others[0]])
    finished = scheduler.prepared(wanted[failing], "it is not there")
    assert finished is not None and finished.reason is FinishReason.DEAD_END
    assert finished.message == f"{kind.value}: it is not there"
    assert sorted(dropped(scheduler)) == sorted(wanted[one] for one in others)
    assert scheduler.prepared(wanted[others[-1]]) is None
    check_invariants(scheduler)


def test_an_abort_drops_what_is_ready_and_what_is_not() -> None:
    scheduler = make_scheduler(prepared_kinds=ALL)
    scheduler.add(make_request("a", 3, requirements=(ADAPTER, *PICTURES)))
    numbers = [one.preparation_id for one in asked(scheduler)]
    scheduler.prepared(numbers[1])
    scheduler.abort("a")
    assert sorted(dropped(scheduler)) == numbers
    check_invariants(scheduler)


def test_after_a_lost_worker_everything_is_asked_for_again() -> None:
    scheduler = make_scheduler(prepared_kinds=ALL)
    scheduler.add(make_request("part", 3, requirements=(ADAPTER, REMOTE)))
    scheduler.add(make_request("whole", 3, requirements=(ADAPTER,)))
    part, _, whole = asked(scheduler)
    scheduler.prepared(part.preparation_id)
    scheduler.prepared(whole.preparation_id)
    scheduler.worker_lost()
    scheduler.worker_back()
    assert scheduler.prepared(part.preparation_id) is None, "an answer of the worker before"
    check_invariants(scheduler)
    assert [one.request.request_id for one in asked(scheduler)] == ["part", "part"]
    assert scheduler.schedule() is None  # at its turn the other begins to wait
    assert [one.request.request_id for one in asked(scheduler)] == ["whole"]
    check_invariants(scheduler)


def test_one_that_was_preempted_with_a_token_in_flight_waits_for_both() -> None:
    scheduler = make_scheduler(blocks=4, prepared_kinds=ALL)
    scheduler.add(make_request("old", 6, max_tokens=9))
    step(scheduler)
    scheduler.add(make_request("new", range(20, 26), max_tokens=9, requirements=(ADAPTER, REMOTE)))
    for preparation in asked(scheduler):
        scheduler.prepared(preparation.preparation_id)
    new = scheduler.find("new")
    assert new is not None
    scheduler.schedule()
    while scheduler.schedule() is not None and not new.num_preemptions:
        answer_oldest(scheduler)
    assert new.status is Status.PREPARING and new.num_awaited == 1
    known = len(new.token_ids)
    wanted = asked(scheduler)
    assert {one.requirement for one in wanted} == {ADAPTER, REMOTE}
    while scheduler.num_in_flight:
        answer_oldest(scheduler)
        check_invariants(scheduler)
    assert new.num_awaited == 0 and len(new.token_ids) == known + 1
    for preparation in wanted:
        assert new.status is Status.PREPARING
        scheduler.prepared(preparation.preparation_id)
    assert new.status is Status.PREEMPTED  # type: ignore[comparison-overlap]
    check_invariants(scheduler)


def test_no_more_sequences_are_prepared_than_twice_the_slots_whatever_each_requires() -> None:
    scheduler = make_scheduler(max_num_seqs=1, prepared_kinds=ALL)
    for name in "abc":
        scheduler.add(make_request(name, 3, requirements=(ADAPTER, *PICTURES)))
    assert {one.request.request_id for one in asked(scheduler)} == {"a", "b"}
    scheduler.abort("a")
    preparations = scheduler.take_preparations()
    assert preparations is not None and len(preparations.dropped_ids) == 3
    assert {one.request.request_id for one in preparations.wanted} == {"c"}


def test_what_the_worker_does_not_prepare_is_refused_except_a_grammar_that_it_reads() -> None:
    scheduler = make_scheduler(prepared_kinds=(RequirementKind.ADAPTER,))
    with pytest.raises(Refused, match="requirements: the worker prepares no remote KV"):
        scheduler.add(make_request("a", 3, requirements=(ADAPTER, REMOTE)))
    with pytest.raises(Refused, match="requirements: two are equal"):
        scheduler.add(make_request("a", 3, requirements=(ADAPTER, ADAPTER)))
    sequence = scheduler.add(make_request("a", 3, requirements=(GRAMMAR,)))
    assert sequence.status is Status.WAITING and plan_step(scheduler).new_sequences


def test_a_sequence_moves_only_to_a_worker_that_prepares_what_it_requires() -> None:
    source = Scheduler(replace(SMALL, prepared_kinds=ALL))
    sequence = source.add(make_request("a", 3, requirements=(ADAPTER, GRAMMAR)))
    (_, grammar) = asked(source)
    source.prepared(grammar.preparation_id)
    source.worker_lost()
    source.migration.migrate_out()
    assert not make_scheduler(prepared_kinds=(GRAMMAR.kind,)).migration.can_hold(sequence)
    target = make_scheduler(prepared_kinds=(RequirementKind.ADAPTER,))
    assert target.migration.can_hold(sequence)
    target.migration.migrate_in(sequence)
    assert [one.requirement for one in asked(target)] == [ADAPTER]
    check_invariants(target)
