"""Equal tokens share KV only where everything else that it depends on is equal, too."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from xxhash import xxh64_intdigest

from scheduler_svc.core import Preemption, Refused, Scheduler
from scheduler_svc.core.invariants import check_invariants
from scheduler_svc.core.kv.prefix_cache import PrefixCache
from scheduler_svc.core.request import block_hash, identity
from scheduler_svc.core.request.block_hash import NO_PARENT, chain, chain_with, root_of
from scheduler_svc.core.request.identity import Root, origins_of
from scheduler_svc.core.request.request import Extra
from tests.scheduler_svc.core.builders import (
    SMALL,
    answer,
    make_request,
    make_scheduler,
    plan_step,
    step,
)
from tests.scheduler_svc.core.soak import Failed, Tally, run_episode
from tests.scheduler_svc.core.transitions import CacheTruth

Monkeypatch = pytest.MonkeyPatch
Plant = Callable[[Monkeypatch], None]
SIZE = SMALL.block_size
CAT, DOG = (Extra(3, 7, number << 100) for number in (1, 2))  # in blocks 0 and 1 of four tokens
TOKENS = [5, 6, 7, 9, 9, 9, 9, 8, 8, 8, 8, 8, 8]  # 9: the pictures' placeholder


def no_collision(monkeypatch: Monkeypatch) -> None:
    """Leaves the hash functions as they are."""


def tokens_alone(monkeypatch: Monkeypatch) -> None:
    """Plants a collision of all blocks with equal tokens after equal tokens."""
    whole = 8 + 8 * SIZE
    monkeypatch.setattr(block_hash, "xxh64_intdigest", lambda data: xxh64_intdigest(data[:whole]))
    monkeypatch.setattr(identity, "root_of", lambda *parts: 7 if any(parts) else NO_PARENT)


def all_alike(monkeypatch: Monkeypatch) -> None:
    """Plants a collision of all blocks and of all roots."""
    monkeypatch.setattr(block_hash, "xxh64_intdigest", lambda data: 1)
    monkeypatch.setattr(identity, "root_of", lambda *parts: 1)


COLLISIONS = pytest.mark.parametrize("collide", [no_collision, tokens_alone, all_alike])


def hits(scheduler: Scheduler, request_id: str, **fields: Any) -> int:
    """Prompt tokens that a request of the same tokens finds in the cache; it runs to its end."""
    scheduler.add(make_request(request_id, TOKENS, max_tokens=1, **fields))
    (finished,) = step(scheduler).finished
    check_invariants(scheduler)
    return finished.num_cached_tokens


@COLLISIONS
def test_two_pictures_with_equal_placeholders_share_no_block(
    collide: Plant, monkeypatch: Monkeypatch
) -> None:
    collide(monkeypatch)
    scheduler = make_scheduler()
    assert hits(scheduler, "cat", extras=(CAT,)) == 0
    assert hits(scheduler, "dog", extras=(DOG,)) == 0
    assert hits(scheduler, "text") == 0


@pytest.mark.parametrize("collide", [no_collision, tokens_alone])
def test_equal_pictures_share_their_blocks(collide: Plant, monkeypatch: Monkeypatch) -> None:
    collide(monkeypatch)
    scheduler = make_scheduler()
    hits(scheduler, "cat", extras=(CAT,))
    assert hits(scheduler, "again", extras=(replace(CAT),)) == 3 * SIZE


def test_with_one_hash_for_all_the_first_block_is_still_found(monkeypatch: Monkeypatch) -> None:
    all_alike(monkeypatch)
    scheduler = make_scheduler()
    hits(scheduler, "cat", extras=(CAT,))
    assert hits(scheduler, "again", extras=(CAT,)) == SIZE


@pytest.mark.parametrize("collide", [no_collision, tokens_alone])
def test_blocks_before_a_picture_are_shared_by_all(
    collide: Plant, monkeypatch: Monkeypatch
) -> None:
    collide(monkeypatch)
    scheduler, late = make_scheduler(), Extra(2 * SIZE, 2 * SIZE + 2, 1)
    hits(scheduler, "a", extras=(late,))
    assert hits(scheduler, "b", extras=(replace(late, content_id=2),)) == 2 * SIZE
    assert hits(scheduler, "c") == 2 * SIZE


@COLLISIONS
@pytest.mark.parametrize("longer", [Extra(3, 6, CAT.content_id), Extra(2, 7, CAT.content_id)])
def test_a_picture_with_other_placeholders_is_another(
    longer: Extra, collide: Plant, monkeypatch: Monkeypatch
) -> None:
    collide(monkeypatch)
    scheduler = make_scheduler()
    hits(scheduler, "cat", extras=(CAT,))
    assert hits(scheduler, "longer", extras=(longer,)) == 0


@COLLISIONS
@pytest.mark.parametrize("field", ["adapter_id", "cache_salt"])
def test_adapters_and_salts_never_share(
    field: str, collide: Plant, monkeypatch: Monkeypatch
) -> None:
    collide(monkeypatch)
    scheduler = make_scheduler()
    assert [hits(scheduler, name, **{field: name}) for name in ("law", "code", "")] == [0, 0, 0]


@COLLISIONS
def test_what_stood_in_a_block_before_is_no_part_of_it(
    collide: Plant, monkeypatch: Monkeypatch
) -> None:
    """Blocks of an adapter are handed out anew, to a request without one and back."""
    collide(monkeypatch)
    scheduler = make_scheduler(blocks=4)
    hits(scheduler, "law", adapter_id="law")
    assert hits(scheduler, "plain") == 0
    assert hits(scheduler, "law again", adapter_id="law") == 0


def test_an_output_that_fills_a_pictures_last_block_is_found_by_equal_ones_alone(
    monkeypatch: Monkeypatch,
) -> None:
    tokens_alone(monkeypatch)
    scheduler, turn = make_scheduler(), [*TOKENS[:6], 500, 500, 500]
    scheduler.add(make_request("cat", TOKENS[:6], max_tokens=6, extras=(replace(CAT, end=6),)))
    for _ in range(6):
        step(scheduler)
    for picture, found in ((CAT, 2 * SIZE), (DOG, 0)):
        scheduler.add(make_request("turn", turn, extras=(replace(picture, end=6),)))
        (entered,) = plan_step(scheduler).new_sequences
        assert entered.num_computed_tokens == found
        answer(scheduler, 500)
        scheduler.abort("turn")


def test_requests_of_one_fork_group_have_one_adapter_and_the_same_pictures() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", TOKENS, fork_group="g", extras=(CAT,), adapter_id="law"))
    for name, rest in (
        ("extras", {"adapter_id": "law", "extras": (DOG,)}),
        ("adapter_id", {"extras": (CAT,)}),
    ):
        with pytest.raises(Refused, match=f"is live with another {name}"):
            scheduler.add(make_request("b", TOKENS, fork_group="g", **rest))  # type: ignore[arg-type]
    scheduler.add(make_request("b", TOKENS, fork_group="g", extras=(CAT,), adapter_id="law"))
    check_invariants(scheduler)


@COLLISIONS
def test_a_sequence_that_was_swapped_out_takes_its_own_blocks_back(
    collide: Plant, monkeypatch: Monkeypatch
) -> None:
    collide(monkeypatch)
    scheduler = make_scheduler(
        blocks=6, max_num_seqs=2, preemption=Preemption.SWAP, num_host_blocks=8
    )
    for name, picture in (("cat", CAT), ("dog", DOG)):
        scheduler.add(make_request(name, TOKENS[:9], max_tokens=6, extras=(picture,)))
    swapped_in = 0
    while scheduler.num_running or scheduler.num_waiting:
        plan = plan_step(scheduler)
        answer(scheduler, *[500] * len(plan.sampled_slots))
        check_invariants(scheduler)
        swapped_in += 0 if plan.moves is None else len(plan.moves.swapped_in)
    view = scheduler.view
    assert view.num_preemptions and view.num_swapped_out >= swapped_in >= 1


def test_what_nothing_is_set_of_has_no_origin_and_the_hashes_of_before() -> None:
    scheduler = make_scheduler()
    sequence = scheduler.add(make_request("a", TOKENS))
    step(scheduler)
    assert sequence.origins is None and sequence.root == NO_PARENT
    assert scheduler.internal_state.pool.cache._origins is None
    tokens = np.array(TOKENS, dtype=np.int32)
    assert chain_with((), 0, tokens, SIZE) == chain(tokens, SIZE)
    assert root_of("salt", "fp8_e4m3") == Root("salt", "fp8_e4m3").hash == 17263214080737714055


def test_each_part_of_a_root_has_a_hash_and_an_origin_of_its_own() -> None:
    roots = [Root(*["x" if part == here else "" for part in range(4)]) for here in range(4)]
    roots += [Root("x", adapter_id="x"), Root("xx"), Root(adapter_id="xx"), Root("", "", "x", "x")]
    assert len({root.hash for root in roots}) == len({root.to_bytes() for root in roots}) == 8
    origins = [origins_of(root, ()) for root in roots]
    assert len({found.digests.tobytes() for found in origins if found is not None}) == 8
    assert not Root() and origins_of(Root(), ()) is None and Root().hash == NO_PARENT


def test_a_chain_with_pictures_can_be_continued_at_any_block() -> None:
    tokens, extras = np.array(TOKENS * 3, dtype=np.int32), (CAT, Extra(14, 21, 5), Extra(21, 30, 5))
    whole = chain_with(extras, 0, tokens, SIZE)
    for block in range(1, len(whole)):
        begin = block * SIZE
        rest = chain_with(extras, begin, tokens[begin:], SIZE, whole[block - 1])
        assert whole[block:] == rest


# --- random walks with planted collisions --------------------------------------------------------


@pytest.fixture
def colliding(monkeypatch: Monkeypatch) -> Monkeypatch:
    """Random walks whose hashes see tokens alone; the worker still checks each KV that is read."""

    def content_of_tokens(data: bytes) -> int:
        return 0 if len(data) < 8 else xxh64_intdigest(data[:8] + data[-8:])

    monkeypatch.setattr(block_hash, "xxh64_intdigest", content_of_tokens)
    monkeypatch.setattr(identity, "root_of", lambda *parts: 7 if any(parts) else NO_PARENT)
    monkeypatch.setattr(CacheTruth, "check", lambda *_: None)  # it knows contents by their hash
    return monkeypatch


@pytest.mark.parametrize("episode", range(4))
def test_no_walk_reads_what_a_collision_offers(episode: int, colliding: Monkeypatch) -> None:
    run_episode(seed=11, episode=episode, num_actions=400, tally=Tally(), tell=False)


def test_without_origins_a_walk_reads_the_kv_of_another_picture(colliding: Monkeypatch) -> None:
    is_equal = PrefixCache._is_equal

    def weak(self: PrefixCache, *arguments: Any) -> Any:
        origins, self._origins = self._origins, None
        try:
            return is_equal(self, *arguments[:-1], None)
        finally:
            self._origins = origins

    colliding.setattr(PrefixCache, "_is_equal", weak)
    with pytest.raises(Failed):
        for episode in range(20):
            run_episode(seed=11, episode=episode, num_actions=400, tally=Tally(), tell=False)
