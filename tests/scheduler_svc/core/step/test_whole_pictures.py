"""Pictures whose tokens see each other both ways: no step ends within one, none waits for ever."""

import pytest

from scheduler_svc.core import Refused
from scheduler_svc.core.request.request import Extra
from scheduler_svc.core.step.whole_pictures import whole_chunk
from tests.scheduler_svc.core.builders import (
    answer,
    make_request,
    make_scheduler,
    plan_step,
    rows,
    step,
)

ONE = (Extra(5, 9, 1),)


@pytest.mark.parametrize(
    ("begin", "chunk", "most", "expected"),
    [
        (0, 5, 64, 5),  # it ends where the picture begins
        (0, 6, 64, 5),
        (0, 8, 64, 5),
        (0, 9, 64, 9),
        (0, 12, 64, 12),
        (5, 1, 64, 4),  # it begins there: all of it
        (5, 3, 4, 4),
        (5, 3, 3, 0),  # which a step has no room for
        (7, 1, 64, 2),  # after a cached prefix that ends within it
        (7, 1, 1, 0),
        (9, 1, 64, 1),
    ],
)
def test_a_chunk_ends_before_a_picture_or_has_all_of_it(
    begin: int, chunk: int, most: int, expected: int
) -> None:
    assert whole_chunk(ONE, begin, chunk, most) == expected


def test_a_prompt_in_chunks_stops_at_its_pictures_and_takes_them_whole() -> None:
    scheduler = make_scheduler(keeps_pictures_whole=True, long_prefill_token_threshold=3)
    pictures = (Extra(4, 9, 1), Extra(9, 12, 2))
    scheduler.add(make_request("a", 14, extras=pictures))
    sizes = []
    while not sizes or sum(sizes) < 14:
        plan = plan_step(scheduler)
        sizes.append(rows(plan)["a"])
        answer(scheduler, *[500] * len(plan.sampled_slots))
    assert sizes == [3, 1, 5, 3, 2]


def test_a_picture_waits_for_a_step_with_room_and_new_requests_wait_with_it() -> None:
    scheduler = make_scheduler(
        keeps_pictures_whole=True, max_num_batched_tokens=8, max_num_seqs=4, blocks=32
    )
    for name in ("b", "c"):
        scheduler.add(make_request(name, 2, max_tokens=3))
    step(scheduler)
    scheduler.add(make_request("a", 12, extras=(Extra(3, 11, 1),), max_tokens=1))
    assert rows(plan_step(scheduler)) == {"b": 1, "c": 1, "a": 3}  # up to the picture
    scheduler.add(make_request("d", 2, max_tokens=1))
    assert rows(plan_step(scheduler)) == {"b": 1, "c": 1}  # no room for eight tokens more
    assert "d" not in rows(plan_step(scheduler))  # nor has who would decode in their place


def test_a_picture_that_no_step_can_compute_is_refused() -> None:
    scheduler = make_scheduler(keeps_pictures_whole=True, max_num_batched_tokens=8)
    with pytest.raises(Refused, match=r"extras\[0\] has 9 tokens, and a step.*at most 8"):
        scheduler.add(make_request("a", 12, extras=(Extra(0, 9, 1),)))
    make_scheduler(max_num_batched_tokens=8).add(make_request("a", 12, extras=(Extra(0, 9, 1),)))
