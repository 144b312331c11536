"""n outputs for one prompt: seeds, ids and token counts."""

import pytest

from gateway.errors.request_errors import RequestError
from gateway.request.choices import choice_seed, expand, total_usage
from gateway.request.generation import GenerationRequest, SamplingParams, Usage


def request(**sampling: float) -> GenerationRequest:
    return GenerationRequest("a", "Hello", SamplingParams(**sampling))


def test_one_choice_is_the_request_itself() -> None:
    wanted = request(temperature=0.0, seed=5)
    assert expand(wanted, None) == expand(wanted, 1) == [wanted]


def test_choices_differ_in_id_and_seed_alone_and_are_reproducible() -> None:
    choices = expand(request(temperature=0.5, seed=5), 16)
    assert choices == expand(request(temperature=0.5, seed=5), 16)
    assert [choice.request_id for choice in choices] == [f"a-{i}" for i in range(16)]
    seeds = [choice.sampling.seed for choice in choices]
    assert seeds[0] == 5  # as without n
    assert len(set(seeds)) == 16
    assert all(0 <= seed < 1 << 64 for seed in seeds if seed is not None)
    assert {choice.sampling.temperature for choice in choices} == {0.5}


def test_choices_name_one_group_so_that_their_prompt_is_computed_once() -> None:
    assert {choice.reuse.fork_group for choice in expand(request(), 3)} == {"a"}
    assert [choice.reuse.fork_group for choice in expand(request(), 1)] == [""]


def test_without_a_seed_every_choice_gets_its_own_from_the_scheduler() -> None:
    assert {choice.sampling.seed for choice in expand(request(), 4)} == {None}


def test_requests_with_neighbouring_seeds_share_no_choice() -> None:
    seeds = [choice_seed(seed, index) for seed in range(100) for index in range(16)]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize("count", [-1, 0, 129])
def test_a_count_out_of_range_is_refused_by_name(count: int) -> None:
    with pytest.raises(RequestError) as refusal:
        expand(request(), count)
    assert refusal.value.field == "n"


def test_greedy_choices_are_all_the_same_and_allowed() -> None:
    assert {choice.sampling.temperature for choice in expand(request(temperature=0.0), 2)} == {0}


def test_a_prompt_counts_once_however_many_choices_it_has() -> None:
    usages = [Usage(10, 1, 0), Usage(10, 2, 8), Usage(20, 4, 16), Usage(20, 8, 16)]
    assert total_usage(usages, 2) == Usage(30, 15, 16)
    assert total_usage(usages, 1) == Usage(60, 15, 40)
