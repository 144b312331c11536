"""Placement of new sequences: near cached prefixes, unless the load is too high."""

from dataclasses import replace

from scheduler_svc.core import RequirementKind, Scheduler
from scheduler_svc.core.estimate.placement import (
    TOKENS_PER_ADAPTER,
    TOKENS_PER_LIVE_REQUEST,
    Option,
    option_of,
    preferred,
    ranking,
)
from scheduler_svc.core.request.requirement import adapter_requirement
from scheduler_svc.core.request.sequence import Sequence
from tests.scheduler_svc.core.builders import make_request, make_scheduler, plan_step, step


def place(name: str, num_prompt: int, *schedulers: Scheduler) -> int:
    """Places a request, adds it and computes its prompt; returns the index of the scheduler."""
    request = make_request(name, num_prompt)
    probe = Sequence(request, 0, ())
    best = ranking([option_of(scheduler, probe) for scheduler in schedulers])[0]
    schedulers[best].add(request)
    step(schedulers[best])
    return best


def large() -> Scheduler:
    return make_scheduler(
        blocks=4000, max_num_seqs=200, max_num_batched_tokens=4000, max_model_len=600
    )


def test_a_cached_prefix_draws_a_request() -> None:
    assert ranking([Option(100, 0, 0), Option(20, 0, 1)]) == [1, 0]


def test_a_cached_prefix_does_not_outweigh_a_longer_backlog() -> None:
    assert ranking([Option(100, 0, 0), Option(20, 90, 0)]) == [0, 1]


def test_without_a_prefix_the_least_loaded_wins_and_ties_go_to_the_least_backlog() -> None:
    assert ranking([Option(9, 0, 2), Option(9, 0, 1), Option(9, 5, 1)]) == [1, 2, 0]
    live = TOKENS_PER_LIVE_REQUEST
    assert ranking([Option(9, live, 0), Option(9 + live, 0, 0)]) == [1, 0]
    assert ranking([Option(9, 0, 0)] * 3) == [0, 1, 2]


def test_the_exact_prefix_is_counted() -> None:
    first, second = large(), large()
    first.add(make_request("a", 99))
    step(first)
    option = option_of(first, Sequence(make_request("b", 120), 0, ()))
    assert option == Option(num_uncached_tokens=120 - 96, num_backlog_tokens=0, num_live=1)
    assert option_of(second, Sequence(make_request("b", 120), 0, ())).num_uncached_tokens == 120


def test_what_is_waiting_or_half_computed_is_backlog() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10, max_num_seqs=1)
    scheduler.add(make_request("a", 30))
    scheduler.add(make_request("b", 7))
    plan_step(scheduler)
    option = option_of(scheduler, Sequence(make_request("c", range(500, 505)), 0, ()))
    assert option == Option(num_uncached_tokens=5, num_backlog_tokens=19 + 7, num_live=2)


def test_one_hot_prefix_spreads_when_its_group_is_full_of_it() -> None:
    """400 common tokens outweigh 12 live requests; then the other group computes them, too."""
    groups = large(), large()
    places = [place(f"r{number}", 401, *groups) for number in range(60)]
    assert places[0] == 0 and places[:10] == [0] * 10  # the prefix attracts
    first_other = places.index(1)
    assert 10 < first_other < 20
    assert abs(places.count(0) - places.count(1)) <= first_other


def test_different_prompts_spread_evenly() -> None:
    groups = large(), large()
    places = []
    for number in range(20):
        request = make_request(f"r{number}", range(10 * number, 10 * number + 9))
        probe = Sequence(request, 0, ())
        best = ranking([option_of(group, probe) for group in groups])[0]
        groups[best].add(request)
        places.append(best)
    assert places.count(0) == 10


def test_a_group_whose_worker_has_had_the_adapter_draws_its_requests() -> None:
    adapter = adapter_requirement("law")
    kinds = (RequirementKind.ADAPTER,)
    groups = [make_scheduler(prepared_kinds=kinds) for _ in range(2)]
    probe = Sequence(make_request("a", 9, adapter_id="law", requirements=(adapter,)), 0, ())
    assert [option_of(group, probe).has_adapter for group in groups] == [False, False]
    groups[1].add(probe.request)
    asked = groups[1].take_preparations()
    assert asked is not None
    groups[1].prepared(asked.wanted[0].preparation_id)
    options = [option_of(group, probe) for group in groups]
    assert [option.has_adapter for option in options] == [False, True]
    assert ranking(options) == [1, 0]
    far_behind = replace(options[1], num_backlog_tokens=2 * TOKENS_PER_ADAPTER)
    assert ranking([options[0], far_behind]) == [0, 1]
    groups[1].worker_lost()
    assert not option_of(groups[1], probe).has_adapter
    assert option_of(groups[0], Sequence(make_request("b", 9), 0, ())).has_adapter


def test_of_groups_that_cost_about_the_same_a_key_draws_always_the_same() -> None:
    options = [Option(400, 0, 0), Option(400, 90, 0), Option(400, 50, 0), Option(400, 900, 0)]
    names = ["a:1", "b:1", "c:1", "d:1"]
    drawn = set()
    for number in range(64):
        key = ("", f"key {number}")
        order = preferred(ranking(options), options, names, key)
        assert sorted(order) == [0, 1, 2, 3]
        assert order[0] != 3, "it costs more than a quarter of the prompt more"
        assert order == preferred(ranking(options), options, names, key)
        drawn.add(order[0])
        left = [index for index in (0, 1, 2) if index != (order[0] + 1) % 3]
        few = preferred([0, 1], [options[i] for i in left], [names[i] for i in left], key)
        assert left[few[0]] == order[0], "another group went, and the key draws another one"
    assert drawn == {0, 1, 2}


def test_a_key_draws_nothing_away_from_the_group_that_has_the_prefix() -> None:
    options = [Option(16, 0, 3), Option(416, 0, 0)]
    for number in range(16):
        assert preferred(ranking(options), options, ["a", "b"], ("", str(number))) == [0, 1]
