"""Rules for clients: submit requests of all kinds, and abort them at any time."""

import numpy as np

from scheduler_svc.core import RefusalKind, Refused, Request, Status
from scheduler_svc.core.request.request import Extra, Extras
from tests.scheduler_svc.core.draws import Draw
from tests.scheduler_svc.core.world import VOCAB_SIZE, World, rule

# --- prompts of every length ---------------------------------------------------------------------


@rule(weight=4)
def submit_short(world: World, draw: Draw) -> None:
    world.submit(world.draw_prompt(draw, 1, 8), max_tokens=draw.integer(1, 12))


@rule(weight=2)
def submit_long(world: World, draw: Draw) -> None:
    limit = world.config.max_model_len
    world.submit(world.draw_prompt(draw, limit // 2, limit), max_tokens=draw.integer(1, 12))


@rule(weight=1)
def submit_without_max_tokens(world: World, draw: Draw) -> None:
    world.submit(world.draw_prompt(draw, 1, 12), max_tokens=None)


@rule(weight=0.5)
def submit_with_room_for_one_token(world: World, draw: Draw) -> None:
    length = world.config.max_model_len - 1
    world.submit(world.draw_prompt(draw, length, length), max_tokens=draw.pick([None, 1, 5]))


@rule(weight=0.5)
def submit_what_needs_every_block(world: World, draw: Draw) -> None:
    num_tokens = world.scheduler.internal_state.pool.num_usable * world.config.block_size
    length = draw.integer(1, min(num_tokens, world.config.max_model_len - 1))
    prompt = world.draw_prompt(draw, length, length)
    world.submit(prompt, max_tokens=num_tokens + 1 - len(prompt))


@rule(weight=1)
def submit_whole_blocks(world: World, draw: Draw) -> None:
    length = draw.integer(1, 5) * world.config.block_size
    world.submit(world.draw_prompt(draw, length, length), max_tokens=draw.integer(1, 6))


# --- prompts that others have computed -----------------------------------------------------------


@rule(weight=2, when=lambda world: bool(world.requests))
def submit_a_prompt_again(world: World, draw: Draw) -> None:
    prompt = draw.pick(world.requests[-12:]).prompt_token_ids.tolist()
    world.submit(prompt, max_tokens=draw.integer(1, 8))


@rule(weight=2, when=lambda world: bool(world.requests))
def submit_a_shared_beginning(world: World, draw: Draw) -> None:
    shared = draw.pick(world.requests[-12:]).prompt_token_ids.tolist()
    shared = shared[: draw.integer(1, len(shared))]
    world.submit([*shared, *world.draw_prompt(draw, 1, 6)], max_tokens=draw.integer(1, 8))


@rule(weight=2, when=lambda world: bool(world.requests))
def submit_the_next_turn(world: World, draw: Draw) -> None:
    """Submits an earlier prompt with its answer, as the next turn of a conversation."""
    before = draw.pick(world.requests[-12:])
    answer = world.outputs[before.handle]
    turn = world.draw_prompt(draw, 1, 4)
    world.submit([*before.prompt_token_ids.tolist(), *answer, *turn])


@rule(weight=1)
def submit_a_burst_of_one_prompt(world: World, draw: Draw) -> None:
    prompt = world.draw_prompt(draw, 1, 12)
    for _ in range(draw.integer(2, 4)):
        world.submit(prompt, max_tokens=draw.integer(1, 8))


# --- ends, urgency, belonging --------------------------------------------------------------------


@rule(weight=2)
def submit_with_stop_tokens(world: World, draw: Draw) -> None:
    first, count = draw.integer(0, VOCAB_SIZE - 1), draw.integer(1, 12)
    stops = tuple((first + 3 * step) % VOCAB_SIZE for step in range(count))
    world.submit(world.draw_prompt(draw, 1, 8), max_tokens=16, stop_token_ids=stops)


@rule(weight=1)
def submit_with_min_tokens(world: World, draw: Draw) -> None:
    max_tokens = draw.integer(1, 12)
    world.submit(
        world.draw_prompt(draw, 1, 8),
        max_tokens=max_tokens,
        min_tokens=draw.integer(1, max_tokens),
        stop_token_ids=tuple(range(0, VOCAB_SIZE, 2)),
    )


@rule(weight=1)
def submit_at_the_edges_of_numbers(world: World, draw: Draw) -> None:
    """Submits what int32 and uint32 hold at most, and one more, wherever a request has a number."""
    edges = [2**31 - 1, 2**31, 2**32 - 1]
    world.submit(
        world.draw_prompt(draw, 1, 8),
        max_tokens=draw.pick([None, *edges]),
        min_tokens=draw.pick([0, 1, 2**31 - 1]),
        stop_token_ids=draw.pick([(), (0, VOCAB_SIZE - 1)]),
        deadline_s=draw.pick([None, world.scheduler.now_s + 1e9]),
        priority=draw.pick([-(2**31), -1, 0, 1, 2**31 - 1]),
        client=draw.pick([0, 1, 2**31 - 1]),
    )


@rule(weight=1)
def submit_a_suspect(world: World, draw: Draw) -> None:
    """A request that ran when a scheduler or gateway died."""
    world.submit(world.draw_prompt(draw, 1, 12), max_tokens=draw.integer(1, 8), num_deaths=1)


@rule(weight=1)
def submit_ignoring_eos(world: World, draw: Draw) -> None:
    stops = draw.pick([(), (0,), (5, 6, 7)])
    prompt = world.draw_prompt(draw, 1, 8)
    world.submit(prompt, max_tokens=None, ignore_eos=True, stop_token_ids=stops)


@rule(weight=2)
def submit_with_a_deadline(world: World, draw: Draw) -> None:
    arrival_s = world.scheduler.now_s
    deadline_s = arrival_s + draw.integer(1, 40) / 8
    world.submit(world.draw_prompt(draw, 1, 16), max_tokens=12, deadline_s=deadline_s)


@rule(weight=3)
def submit_with_a_priority(world: World, draw: Draw) -> None:
    priority = draw.integer(-2, 2)
    world.submit(world.draw_prompt(draw, 1, 12), max_tokens=draw.integer(1, 10), priority=priority)


@rule(weight=3)
def submit_for_a_tenant(world: World, draw: Draw) -> None:
    tenant = draw.pick("abc")
    for _ in range(draw.pick([1, 1, 3])):
        world.submit(world.draw_prompt(draw, 1, 12), max_tokens=draw.integer(1, 8), tenant=tenant)


@rule(weight=2)
def submit_under_a_salt(world: World, draw: Draw) -> None:
    """Submits a prompt that others submit, too, under a salt: no blocks may be shared."""
    salt, prompt = draw.pick(["red", "blue"]), world.draw_prompt(draw, 4, 16)
    world.submit(prompt, cache_salt=salt)
    world.submit(prompt, cache_salt=draw.pick(["", salt]))


@rule(weight=1)
def submit_without_the_prefix_cache(world: World, draw: Draw) -> None:
    prompt = world.draw_prompt(draw, 4, 16)
    for skips in draw.pick([(True,), (True, False), (False, True)]):
        world.submit(prompt, skip_prefix_cache=skips)


@rule(weight=3)
def submit_siblings(world: World, draw: Draw) -> None:
    """Submits n requests of one prompt; one may come later, or opt out of the prefix cache."""
    group, prompt = f"g{len(world.requests)}", world.draw_prompt(draw, 1, 20)
    skips = draw.pick([False, False, True])
    extras = draw.pick([(), (), _pictures(draw, len(prompt))])
    for _ in range(draw.integer(2, 4)):
        world.submit(
            prompt,
            max_tokens=draw.integer(1, 10),
            fork_group=group,
            skip_prefix_cache=skips,
            extras=extras,
        )


@rule(weight=1)
def submit_what_another_scheduler_had(world: World, draw: Draw) -> None:
    prompt = world.draw_prompt(draw, 1, 16)
    request_id, max_tokens = f"r{len(world.requests)}", draw.integer(1, 8)
    whole, _ = world.expected(
        Request(request_id, np.array(prompt, dtype=np.int32), max_tokens=max_tokens)
    )
    output = np.array(whole[: draw.integer(0, len(whole) - 1)], dtype=np.int32)
    world.submit(prompt, max_tokens=max_tokens, output_token_ids=output)


@rule(weight=2, when=lambda world: any(s.request.fork_group for s in world.scheduler.live()))
def submit_a_late_sibling(world: World, draw: Draw) -> None:
    other = draw.pick([s.request for s in world.scheduler.live() if s.request.fork_group])
    world.submit(
        other.prompt_token_ids.tolist(),
        max_tokens=draw.integer(1, 10),
        fork_group=other.fork_group,
        tenant=other.tenant,
        cache_salt=other.cache_salt,
        adapter_id=other.adapter_id,
        extras=other.extras,
        skip_prefix_cache=other.skip_prefix_cache,
    )


@rule(weight=0.5, when=lambda world: any(s.request.fork_group for s in world.scheduler.live()))
def submit_a_sibling_that_is_none(world: World, draw: Draw) -> None:
    other = draw.pick([s.request for s in world.scheduler.live() if s.request.fork_group])
    prompt = np.append(other.prompt_token_ids[:-1], [VOCAB_SIZE - 1, 0][: draw.integer(1, 2)])
    if np.array_equal(prompt, other.prompt_token_ids):
        return
    request = Request(
        "bad",
        prompt.astype(np.int32),
        1,
        arrival_s=world.scheduler.now_s,
        fork_group=other.fork_group,
        skip_prefix_cache=other.skip_prefix_cache,
    )
    expect_refusal(world, request, RefusalKind.INVALID)


@rule(weight=2, when=lambda world: bool(world.live))
def change_a_priority(world: World, draw: Draw) -> None:
    world.set_priority(draw.pick(world.live), draw.integer(-2, 2))


@rule(weight=0.5)
def forget_every_prefix(world: World, draw: Draw) -> None:
    world.reset_prefix_cache()


# --- questions about the prompt ------------------------------------------------------------------


@rule(weight=1)
def submit_a_prompt_to_be_scored(world: World, draw: Draw) -> None:
    prompt = world.draw_prompt(draw, 1, 24)
    world.submit(prompt, max_tokens=draw.integer(0, 6), prompt_output_end=len(prompt) - 1)


@rule(weight=1)
def submit_a_prompt_to_be_embedded(world: World, draw: Draw) -> None:
    prompt = world.draw_prompt(draw, 1, 24)
    begin = draw.pick([0, len(prompt) - 1])
    world.submit(prompt, max_tokens=0, prompt_output_begin=begin, prompt_output_end=len(prompt))


@rule(weight=0.5, when=lambda world: bool(world.requests))
def submit_a_known_prompt_to_be_scored(world: World, draw: Draw) -> None:
    prompt = draw.pick(world.requests[-12:]).prompt_token_ids.tolist()
    world.submit(prompt, max_tokens=draw.integer(0, 6), prompt_output_end=len(prompt) - 1)


@rule(weight=0.3)
def submit_a_prompt_to_be_cached(world: World, draw: Draw) -> None:
    world.submit(world.draw_prompt(draw, 1, 24), max_tokens=0)


# --- KV that tokens alone do not tell apart ------------------------------------------------------


@rule(weight=2)
def submit_with_pictures(world: World, draw: Draw) -> None:
    """Submits one prompt with pictures of few contents: placeholders are equal, KV may differ."""
    prompt = world.draw_prompt(draw, 4, 24)
    for _ in range(draw.integer(1, 3)):
        world.submit(prompt, max_tokens=draw.integer(1, 8), extras=_pictures(draw, len(prompt)))


@rule(weight=1)
def submit_to_an_adapter(world: World, draw: Draw) -> None:
    prompt = world.draw_prompt(draw, 4, 16)
    for adapter_id in (draw.pick(["law", "code"]), draw.pick(["", "law"])):
        world.submit(prompt, adapter_id=adapter_id, cache_salt=draw.pick(["", "", "red"]))


def _pictures(draw: Draw, num_tokens: int) -> Extras:
    extras, begin = [], draw.integer(0, 3)
    while begin < num_tokens and len(extras) < 3:
        end = min(begin + draw.integer(1, 6), num_tokens)
        extras.append(Extra(begin, end, draw.integer(1, 2)))
        begin = end + draw.integer(0, 4)
    return tuple(extras)


# --- refusals ------------------------------------------------------------------------------------

_INVALID: tuple[dict[str, object], ...] = (
    {"prompt_token_ids": []},
    {"prompt_token_ids": [VOCAB_SIZE]},
    {"prompt_token_ids": [3, -1]},
    {"max_tokens": -1},
    {"prompt_output_end": 3},
    {"prompt_output_begin": 2, "prompt_output_end": 1},
    {"min_tokens": -1},
    {"min_tokens": 3, "max_tokens": 2},
    {"stop_token_ids": (VOCAB_SIZE,)},
    {"tenant": "t" * 65},
    {"cache_salt": "s" * 257},
    {"fork_group": "g" * 257},
    {"adapter_id": "a" * 257},
    {"extras": (Extra(0, 3, 1),)},
    {"extras": (Extra(0, 1, 1 << 128),)},
    {"extras": (Extra(1, 2, 1), Extra(0, 1, 1))},
)


@rule(weight=0.5)
def submit_what_is_invalid(world: World, draw: Draw) -> None:
    fields = {"prompt_token_ids": [1, 2], **draw.pick(_INVALID)}
    fields["prompt_token_ids"] = np.array(fields["prompt_token_ids"], dtype=np.int32)
    request = Request("bad", arrival_s=world.scheduler.now_s, **fields)  # type: ignore[arg-type]
    expect_refusal(world, request, RefusalKind.INVALID)


@rule(weight=0.5)
def submit_a_prompt_too_long(world: World, draw: Draw) -> None:
    length = world.config.max_model_len + draw.integer(0, 3)
    prompt = np.zeros(length, dtype=np.int32)
    request = Request("bad", prompt, arrival_s=world.scheduler.now_s)
    expect_refusal(world, request, RefusalKind.INVALID)


@rule(weight=0.5, when=lambda world: bool(world.live))
def submit_under_a_live_id(world: World, draw: Draw) -> None:
    prompt = np.array([1], dtype=np.int32)
    request = Request(draw.pick(world.live), prompt, arrival_s=world.scheduler.now_s)
    expect_refusal(world, request, RefusalKind.DUPLICATE)


@rule(weight=0.5)
def submit_after_the_deadline(world: World, draw: Draw) -> None:
    now_s = world.scheduler.now_s
    prompt = np.array([1], dtype=np.int32)
    late = Request("late", prompt, max_tokens=1, arrival_s=now_s, deadline_s=now_s)
    # A worker that was replaced may have fewer blocks than there are groups.
    fits = world.config.blocks_needed(2) <= world.scheduler.view.num_blocks
    expect_refusal(world, late, RefusalKind.EXPIRED if fits else RefusalKind.NEVER_FITS)


def expect_refusal(world: World, request: Request, kind: RefusalKind) -> None:
    """Submits a request that is refused and leaves no trace."""
    with world.unchanged():
        try:
            world.scheduler.add(request)
        except Refused as refused:
            assert refused.kind is kind, refused
        else:
            raise AssertionError(f"{request} was let in")


@rule(weight=1)
def come_back_when_told(world: World, draw: Draw) -> None:
    """Makes a reservation; a retry in time is accepted if there is any room."""
    now_s = world.scheduler.now_s
    prompt = np.array(world.draw_prompt(draw, 1, 8), dtype=np.int32)
    reserved = Request(f"r{len(world.requests)}", prompt, 2, tenant=draw.pick("abc"))
    world.scheduler.reserve(reserved, now_s + draw.integer(0, 16) / 8)
    world.check()


# --- giving up -----------------------------------------------------------------------------------


@rule(weight=0.7, when=lambda world: bool(world.live_in(Status.WAITING)))
def abort_one_that_waits(world: World, draw: Draw) -> None:
    world.abort(draw.pick(world.live_in(Status.WAITING)))


@rule(weight=0.7, when=lambda world: bool(world.live_in(Status.RUNNING)))
def abort_one_that_runs(world: World, draw: Draw) -> None:
    world.abort(draw.pick(world.live_in(Status.RUNNING)))


@rule(weight=0.7, when=lambda world: bool(world.live_in(Status.PREEMPTED)))
def abort_one_that_was_preempted(world: World, draw: Draw) -> None:
    world.abort(draw.pick(world.live_in(Status.PREEMPTED)))


@rule(weight=0.2, when=lambda world: bool(world.live))
def abort_everybody(world: World, draw: Draw) -> None:
    for request_id in world.live:
        world.abort(request_id)


@rule(weight=0.2)
def abort_nobody(world: World, draw: Draw) -> None:
    with world.unchanged():
        assert world.scheduler.abort(draw.pick(["missing", ""])) is None


# --- time ----------------------------------------------------------------------------------------


@rule(weight=4)
def let_time_pass(world: World, draw: Draw) -> None:
    world.expire(world.scheduler.now_s + draw.integer(0, 8) / 8)


@rule(weight=0.7, when=lambda world: world.scheduler.next_deadline_s is not None)
def let_time_pass_to_the_next_deadline(world: World, draw: Draw) -> None:
    deadline_s = world.scheduler.next_deadline_s
    assert deadline_s is not None
    world.expire(deadline_s)
    assert (world.scheduler.next_deadline_s or deadline_s + 1) > deadline_s, "not expired in time"


@rule(weight=0.2)
def tell_a_time_that_is_past(world: World, draw: Draw) -> None:
    with world.unchanged():
        assert world.scheduler.expire(world.scheduler.now_s - draw.integer(0, 9)) == []
