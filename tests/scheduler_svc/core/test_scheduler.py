"""Life of a request: accepted or refused, every token once, and one end."""

import numpy as np
import pytest

from scheduler_svc.core import (
    FinishReason,
    OutOfStep,
    RefusalKind,
    Refused,
    StepOutputs,
    StepResult,
)
from scheduler_svc.core.invariants import check_invariants
from tests.scheduler_svc.core.builders import (
    SMALL,
    answer,
    make_request,
    make_scheduler,
    plan_step,
    rows,
    step,
)

EOS = 0


def ends(outputs: StepOutputs) -> dict[str, FinishReason]:
    """Request id to finish reason of the ends of a step."""
    return {finished.request.request_id: finished.reason for finished in outputs.finished}


# --- accepted or refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "rest", "message"),
    [
        ([], {}, "prompt_token_ids is empty"),
        (64, {}, "prompt_token_ids has 64 tokens; with max_model_len 64 at most 63"),
        ([5, 1000], {}, "prompt_token_ids has an id outside 0..999"),
        ([-1], {}, "prompt_token_ids has an id outside 0..999"),
        (4, {"max_tokens": -1}, "max_tokens is -1, must not be negative"),
        (65, {"max_tokens": 0}, "prompt_token_ids has 65 tokens; with max_model_len 64 at most 64"),
        (4, {"prompt_output_end": 5}, r"prompt outputs 0\.\.5 are outside the prompt"),
        (4, {"min_tokens": -1}, "min_tokens is -1, must not be negative"),
        (4, {"max_tokens": 2, "min_tokens": 3}, r"min_tokens \(3\) exceeds max_tokens \(2\)"),
        (4, {"stop_token_ids": (1000,)}, "stop_token_ids has an id outside 0..999"),
        (4, {"stop_token_ids": (-1,)}, "stop_token_ids has an id outside 0..999"),
    ],
)
def test_a_bad_request_is_refused_by_the_name_of_its_field(
    prompt: int | list[int], rest: dict[str, object], message: str
) -> None:
    scheduler = make_scheduler()
    with pytest.raises(Refused, match=message) as refusal:
        scheduler.add(make_request("a", prompt, **rest))
    assert refusal.value.kind is RefusalKind.INVALID
    assert (scheduler.num_accepted, scheduler.num_waiting) == (0, 0)


def test_a_live_id_is_refused_and_an_ended_one_is_not() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 4, max_tokens=1))
    with pytest.raises(Refused, match="request_id 'a' is live already") as refusal:
        scheduler.add(make_request("a", 4))
    assert refusal.value.kind is RefusalKind.DUPLICATE
    step(scheduler)
    scheduler.add(make_request("a", 4))
    assert scheduler.num_waiting == 1


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "fits"),
    [(8, 9, True), (8, 10, False), (16, 1, True), (17, 1, False), (4, 13, True), (4, None, False)],
)
def test_what_could_never_fit_is_refused_at_once(
    num_prompt: int, max_tokens: int | None, fits: bool
) -> None:
    """Four blocks of four: 16 tokens with KV, and the last one, which needs none."""
    scheduler = make_scheduler(blocks=4)
    request = make_request("a", num_prompt, max_tokens=max_tokens)
    if fits:
        scheduler.add(request)
        while scheduler.find("a"):
            step(scheduler)
        assert scheduler.num_finished == 1
    else:
        with pytest.raises(Refused, match="KV blocks of 4 tokens, the worker has 4") as refusal:
            scheduler.add(request)
        assert refusal.value.kind is RefusalKind.NEVER_FITS


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"num_blocks": 1}, "num_blocks is 1, must be at least 2"),
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"max_num_batched_tokens": 3}, r"max_num_batched_tokens \(3\) is below max_num_seqs"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold must not be negative"),
    ],
)
def test_limits_that_cannot_work_are_refused(limits: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_scheduler(**limits)


def test_the_config_counts_usable_blocks_without_the_null_block() -> None:
    assert SMALL.num_usable_blocks == 16


# --- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rest", "tokens", "reason", "stop_token_id"),
    [
        ({}, [5, EOS], FinishReason.STOP, None),
        ({}, [5, 1], FinishReason.STOP, None),
        ({"stop_token_ids": (7, 8, 9, 10, 11)}, [5, 11], FinishReason.STOP, 11),
        ({"max_tokens": 3}, [5, 6, 7], FinishReason.LENGTH, None),
        ({"max_tokens": 2}, [5, EOS], FinishReason.STOP, None),
        ({"max_tokens": 2, "stop_token_ids": (7,)}, [5, 7], FinishReason.STOP, 7),
        ({"ignore_eos": True, "max_tokens": 3}, [EOS, 1, 5], FinishReason.LENGTH, None),
        ({"ignore_eos": True, "stop_token_ids": (7,)}, [EOS, 7], FinishReason.STOP, 7),
        ({"ignore_eos": True, "stop_token_ids": (EOS,)}, [5, EOS], FinishReason.STOP, EOS),
        ({"stop_token_ids": (EOS,)}, [5, EOS], FinishReason.STOP, None),
        ({"min_tokens": 2}, [EOS, EOS], FinishReason.STOP, None),
        ({"min_tokens": 3, "stop_token_ids": (7,)}, [7, EOS, 7], FinishReason.STOP, 7),
        ({"min_tokens": 2, "max_tokens": 2}, [EOS, 5], FinishReason.LENGTH, None),
    ],
)
def test_a_request_ends_with_the_right_token_for_the_right_reason(
    rest: dict[str, object], tokens: list[int], reason: FinishReason, stop_token_id: int | None
) -> None:
    scheduler = make_scheduler(eos_token_ids=(EOS, 1))
    scheduler.add(make_request("a", 4, **rest))
    for token in tokens[:-1]:
        assert not step(scheduler, token).finished
    outputs = step(scheduler, tokens[-1])
    assert outputs.token_ids.tolist() == tokens[-1:], "the last token is delivered, too"
    (finished,) = outputs.finished
    assert (finished.reason, finished.stop_token_id) == (reason, stop_token_id)
    assert (finished.num_prompt_tokens, finished.num_output_tokens) == (4, len(tokens))
    assert scheduler.find("a") is None and scheduler.schedule() is None


def test_stops_of_one_request_do_not_stop_another() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 4, stop_token_ids=(7, 8)))
    scheduler.add(make_request("b", range(50, 54), stop_token_ids=(9,)))
    assert ends(step(scheduler, 9, 8)) == {}
    assert ends(step(scheduler, 8, 9)) == {"a": FinishReason.STOP, "b": FinishReason.STOP}


def test_a_slot_keeps_no_stop_of_the_one_before() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("a", 4, stop_token_ids=(7, 8), max_tokens=1))
    step(scheduler)
    scheduler.add(make_request("b", 4, ignore_eos=True))
    assert not step(scheduler, 8).finished
    assert not step(scheduler, 7).finished


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(60, None), (60, 100), (63, None), (5, 7)])
def test_no_step_is_planned_beyond_the_length_limit(
    num_prompt: int, max_tokens: int | None, depth: int
) -> None:
    scheduler = make_scheduler(max_model_len=64)
    scheduler.add(make_request("a", num_prompt, max_tokens=max_tokens))
    num_tokens = 0
    while scheduler.find("a"):
        while scheduler.num_in_flight <= depth:
            plan = scheduler.schedule()
            if plan is None:
                break
            assert int(plan.num_computed[0]) + plan.num_tokens <= 63
        num_tokens += len(answer(scheduler, 500).token_ids)
    assert num_tokens == min(max_tokens or 64, 64 - num_prompt)
    assert scheduler.num_in_flight == 0, "a step was planned for a token beyond the end"


def test_a_chunk_that_is_not_the_last_brings_no_token() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(make_request("a", 10))
    assert len(step(scheduler).token_ids) == 0
    assert len(step(scheduler).token_ids) == 0
    assert step(scheduler, 7).token_ids.tolist() == [7]


def test_tokens_come_with_their_client_and_handle() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 4, client=3, handle=2**32 - 1))
    scheduler.add(make_request("b", range(50, 54), client=1, handle=8))
    outputs = step(scheduler, 70, 80)
    assert outputs.clients.tolist() == [3, 1]
    assert outputs.handles.tolist() == [2**32 - 1, 8]
    assert outputs.token_ids.tolist() == [70, 80]
    assert [outputs.handles.dtype.name, outputs.token_ids.dtype.name] == ["uint32", "int32"]


def test_the_block_of_the_last_token_is_not_cached_because_it_has_no_kv() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 6, max_tokens=2))
    step(scheduler, 70)
    step(scheduler, 71)  # eight tokens, seven of them with KV
    assert len(scheduler.internal_state.pool.cache) == 1
    scheduler.add(make_request("b", [1, 2, 3, 4, 5, 6, 70, 71, 9]))
    assert plan_step(scheduler).new_sequences[0].num_computed_tokens == 4


def test_a_follow_up_finds_the_answer_of_the_turn_before() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 6, max_tokens=8))
    for token in range(70, 78):
        step(scheduler, token)
    scheduler.add(make_request("b", [1, 2, 3, 4, 5, 6, *range(70, 78), 9]))
    assert plan_step(scheduler).new_sequences[0].num_computed_tokens == 12


# --- ahead of the results ------------------------------------------------------------------------


def test_the_token_sampled_after_a_stop_is_dropped() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 4))
    plan_step(scheduler)
    plan_step(scheduler)
    assert ends(answer(scheduler, EOS)) == {"a": FinishReason.STOP}
    assert len(answer(scheduler, 5).token_ids) == 0
    assert scheduler.num_output_tokens == 1
    check_invariants(scheduler)


def test_a_slot_is_handed_on_only_after_the_last_step_that_touches_it() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("a", 4))
    scheduler.add(make_request("b", 4))
    plan_step(scheduler)
    plan_step(scheduler)
    answer(scheduler, EOS)
    assert scheduler.schedule() is None
    answer(scheduler, 5)
    plan = plan_step(scheduler)
    assert (plan.freed_slots, rows(plan)) == ([0], {"b": 4})


def test_a_new_request_with_an_ended_ones_id_does_not_get_its_token() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 4, handle=1))
    plan_step(scheduler)
    scheduler.abort("a")
    scheduler.add(make_request("a", 4, handle=2))
    plan_step(scheduler)
    assert answer(scheduler, 5).handles.tolist() == []
    assert answer(scheduler, 6).handles.tolist() == [2]


@pytest.mark.parametrize(
    ("step_id", "token_ids", "bad_rows"),
    [(2, [5], ()), (0, [5], ()), (1, [], ()), (1, [5, 6], ()), (1, [5], (1,)), (1, [5], (-1,))],
)
def test_a_result_that_does_not_fit_changes_nothing(
    step_id: int, token_ids: list[int], bad_rows: tuple[int, ...]
) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 4))
    plan_step(scheduler)
    with pytest.raises(OutOfStep):
        scheduler.update(StepResult(step_id, np.array(token_ids, dtype=np.int32), bad_rows))
    assert answer(scheduler, 7).token_ids.tolist() == [7]


def test_a_result_that_nobody_asked_for_is_out_of_step() -> None:
    with pytest.raises(OutOfStep, match="result of step 1, expected None"):
        make_scheduler().update(StepResult(1, np.array([], dtype=np.int32)))
