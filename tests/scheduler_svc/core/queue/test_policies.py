"""Scheduling policies alone, and their effect on the running set."""

import itertools
import random

import pytest

from scheduler_svc.core import Policy, Request, Scheduler, SchedulerConfig, Sequence
from scheduler_svc.core.queue.fair_share import OUTPUT_TOKEN_COST, FairShare
from scheduler_svc.core.queue.policies import ByPriority, ByShare, FirstCome, Order, make_order
from tests.scheduler_svc.core.builders import (
    SMALL,
    answer,
    make_request,
    make_scheduler,
    plan_step,
    rows,
    step,
)

NUMBERS = itertools.count()


def sequence(request_id: str, prompt: int = 1, **rest: object) -> Sequence:
    return Sequence(make_request(request_id, prompt, **rest), 64, (), next(NUMBERS))


def taken(order: Order) -> list[str]:
    names = []
    while (one := order.take()) is not None:
        names.append(one.request.request_id)
    return names


def orders() -> list[Order]:
    return [FirstCome(), ByPriority(60.0), ByShare(FairShare(()))]


@pytest.mark.parametrize("order", orders(), ids=lambda order: type(order).__name__)
def test_what_is_put_back_in_reverse_is_taken_in_the_same_order_again(order: Order) -> None:
    for index in range(12):
        request = make_request(f"r{index}", 1, tenant="abc"[index % 3], priority=index % 4)
        order.append(Sequence(request, 64, (), next(NUMBERS)))
    told = [one.request.request_id for one in order]
    first = [order.take() for _ in range(5)]
    for one in reversed(first):
        assert one is not None
        order.put_back(one)
    assert [one.request.request_id for one in order] == told
    assert len(told) == 12


@pytest.mark.parametrize("policy", Policy)
def test_every_policy_has_an_order(policy: Policy) -> None:
    order = make_order(SchedulerConfig(**{**CONFIG, "policy": policy}), FairShare(()))
    order.append(sequence("a"))
    assert taken(order) == ["a"]


CONFIG: dict[str, object] = {name: getattr(SMALL, name) for name in SMALL.__slots__}


def test_a_priority_level_is_worth_its_seconds_of_waiting() -> None:
    order = ByPriority(ageing_s=10)
    order.append(sequence("low", priority=3, arrival_s=0))
    for arrival_s in (0, 29, 31, 1000):
        order.append(sequence(f"at {arrival_s}", priority=0, arrival_s=arrival_s))
    assert taken(order) == ["at 0", "at 29", "low", "at 31", "at 1000"]


def test_the_least_important_gives_way_even_when_it_came_first() -> None:
    scheduler = make_scheduler(blocks=4, policy=Policy.PRIORITY)
    scheduler.add(make_request("low", 7, max_tokens=4, priority=1))
    scheduler.add(make_request("high", range(100, 107), max_tokens=4))
    step(scheduler)
    step(scheduler)
    plan = plan_step(scheduler)  # both need a third block for their ninth token
    assert plan.preempted == ["low"]
    assert rows(plan) == {"high": 1}


def test_a_slot_is_given_up_for_somebody_more_urgent_and_for_nobody_else() -> None:
    scheduler = make_scheduler(max_num_seqs=1, policy=Policy.PRIORITY)
    scheduler.add(make_request("a", 4, max_tokens=8, priority=1))
    step(scheduler)
    scheduler.add(make_request("b", 4, max_tokens=8, priority=1))
    assert rows(plan_step(scheduler)) == {"a": 1}
    scheduler.add(make_request("c", 4, max_tokens=8, priority=0))
    assert scheduler.schedule() is None, "its slot is still touched by the step in flight"
    answer(scheduler, 500)
    assert rows(plan_step(scheduler)) == {"c": 4}
    assert [s.request.request_id for s in scheduler.internal_state.waiting] == ["a", "b"]


def test_nobody_is_sent_back_when_that_would_not_make_room_enough() -> None:
    scheduler = make_scheduler(blocks=8, policy=Policy.PRIORITY)
    scheduler.add(make_request("high", 20, max_tokens=4))
    scheduler.add(make_request("low", range(100, 104), max_tokens=4, priority=9))
    step(scheduler)
    scheduler.add(make_request("urgent", range(200, 228), max_tokens=4, priority=-1))
    scheduler.add(make_request("first", range(300, 304), max_tokens=4, priority=5))
    plan = plan_step(scheduler)
    assert plan.preempted == ["low", "high"]  # both are needed, and both less urgent
    step_on = make_scheduler(blocks=8, policy=Policy.PRIORITY)
    step_on.add(make_request("high", 20, max_tokens=4, priority=-2))
    step_on.add(make_request("low", range(100, 104), max_tokens=4, priority=9))
    step(step_on)
    step_on.add(make_request("urgent", range(200, 228), max_tokens=4, priority=-1))
    assert plan_step(step_on).preempted == []


def shared(*weights: tuple[str, float]) -> FairShare:
    """Counters of more than one tenant; those of two that came and left."""
    share = FairShare(weights)
    for tenant in ("before", "also before"):
        share.enter(tenant, None)
        share.leave(tenant)
    return share


def test_what_a_tenant_did_not_use_is_not_saved_up() -> None:
    share = shared()
    order = ByShare(share)
    for index in range(3):
        order.append(sequence(f"busy {index}", tenant="busy"))
    share.charge_prompt("busy", 1000)
    order.append(sequence("new", tenant="new"))
    assert share.counter("new") == share.counter("busy") == 1000


def test_a_tenant_alone_builds_no_debt_towards_the_next() -> None:
    share = shared()
    order = ByShare(share)
    order.append(sequence("alone", tenant="alone"))
    assert taken(order) == ["alone"]
    share.charge_output("alone", 500)  # while it runs and none waits
    order.append(sequence("next", tenant="next"))
    assert share.counter("next") == 500 * OUTPUT_TOKEN_COST


def test_a_weight_divides_the_cost() -> None:
    share = shared(("gold", 4.0))
    share.charge_prompt("gold", 100)
    share.charge_prompt("other", 100)
    assert share.counter("other") == 4 * share.counter("gold")


def test_tenants_that_stay_away_are_forgotten() -> None:
    share = FairShare(())
    order = ByShare(share)
    order.append(sequence("stays", tenant="stays"))
    for index in range(5000):
        order.append(sequence("passes", tenant=f"t{index}"))
        share.charge_prompt("stays", 1)
        while (one := order.take()) is not None and one.request.tenant == "stays":
            order.put_back(one)
            break
        share.charge_prompt(f"t{index}", 1)
    assert len(share._counters) < 2500


def test_whoever_does_not_fit_is_passed_only_so_often() -> None:
    scheduler = make_scheduler(blocks=6, queue_window=2, max_overtakes=3)
    scheduler.add(make_request("runs", 8, max_tokens=12))
    step(scheduler)
    scheduler.add(make_request("large", range(100, 120), max_tokens=2))
    for index in range(8):
        scheduler.add(make_request(f"s{index}", [200 + index], max_tokens=1))
    entered: list[str] = []
    for _ in range(6):
        plan = plan_step(scheduler)
        entered += [new.request.request_id for new in plan.new_sequences]
        answer(scheduler, *[500] * len(plan.sampled_slots))
    assert entered == ["s0", "s1", "s2"]


def served_by_tenant(policy: Policy, weights: tuple[tuple[str, float], ...] = ()) -> dict[str, int]:
    """Output tokens by tenant; one sends ten times as much, and both always wait."""
    scheduler = make_scheduler(
        max_num_seqs=4,
        blocks=200,
        policy=policy,
        tenant_weights=weights,
        enable_prefix_caching=False,
    )
    rng, served = random.Random(5), {"light": 0, "heavy": 0}
    for number in range(660):
        tenant = "light" if number % 11 == 0 else "heavy"
        prompt = [rng.randrange(1000) for _ in range(rng.randint(1, 12))]
        scheduler.add(
            Request(
                f"r{number}",
                make_request("", prompt).prompt_token_ids,
                max_tokens=rng.randint(1, 9),
                ignore_eos=True,
                tenant=tenant,
            )
        )
    for _ in range(140):
        _count_step(scheduler, served)
    return served


def _count_step(scheduler: Scheduler, served: dict[str, int]) -> None:
    plan = plan_step(scheduler)
    for one in plan.sequences():
        served[one.request.tenant] += 1
    answer(scheduler, *[7] * len(plan.sampled_slots))


def jain(values: list[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))


def test_a_noisy_neighbour_gets_its_share_and_no_more() -> None:
    fair, fcfs = served_by_tenant(Policy.FAIR), served_by_tenant(Policy.FCFS)
    assert jain([*map(float, fair.values())]) > 0.99
    assert jain([*map(float, fcfs.values())]) < 0.7
    assert sum(fair.values()) == sum(fcfs.values())  # fairness leaves no slot idle


def order_of(policy: Policy, tenant: str) -> list[str]:
    """The requests in the order of their admission, with preemptions; half of them are aborted."""
    scheduler = make_scheduler(max_num_seqs=3, blocks=14, policy=policy)
    rng, entered = random.Random(3), []
    for number in range(160):
        for part in range(rng.randint(1, 2)):
            length, most = rng.randint(1, 12), rng.randint(1, 12)
            request = make_request(f"{number}-{part}", length, tenant=tenant, max_tokens=most)
            scheduler.add(request)
        plan = plan_step(scheduler)
        entered += [new.request.request_id for new in plan.new_sequences]
        answer(scheduler, *[7] * len(plan.sampled_slots))
    return entered


@pytest.mark.parametrize("tenant", ["", "only"])
def test_fair_is_first_come_first_served_where_all_are_one_tenant(tenant: str) -> None:
    assert order_of(Policy.FAIR, tenant) == order_of(Policy.FCFS, tenant)
    assert len(order_of(Policy.FAIR, tenant)) > 60


def test_a_tenant_that_comes_second_starts_where_the_first_one_is() -> None:
    share = FairShare(())
    share.enter("first", None)
    share.charge_output("first", 1000)
    assert not share.is_shared and share.counter("first") == 0.0
    share.enter("second", share.counter("first"))
    share.charge_output("first", 3)
    assert share.is_shared
    assert share.counter("first") - share.counter("second") == 6.0


def test_shares_follow_the_weights() -> None:
    served = served_by_tenant(Policy.FAIR, (("heavy", 3.0),))
    assert served["heavy"] / served["light"] == pytest.approx(3.0, rel=0.15)
