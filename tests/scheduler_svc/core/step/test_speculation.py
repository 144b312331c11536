"""Rows with drafts: planned for the most, settled at what came, and never ahead of an answer."""

import numpy as np

from scheduler_svc.core import FinishReason, Preemption, Request, Scheduler, SchedulerConfig
from scheduler_svc.core.invariants import check_invariants
from scheduler_svc.core.step.plan import Drafts, StepOutputs, StepPlan, StepResult

PROMPT = [5, 6, 7, 8, 9]


def make(**fields: object) -> Scheduler:
    limits = {
        "num_blocks": 20,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 40,
        "vocab_size": 100,
    }
    return Scheduler(SchedulerConfig(**{**limits, **fields}))  # type: ignore[arg-type]


def add(scheduler: Scheduler, name: str, **fields: object) -> None:
    handle = scheduler.num_accepted
    prompt = np.array([*PROMPT, 20 + handle], dtype=np.int32)
    scheduler.add(Request(name, prompt, handle=handle, **fields))  # type: ignore[arg-type]


def plan(scheduler: Scheduler, drafts: dict[int, list[int]] | None = None) -> StepPlan | None:
    given: Drafts = {s: np.array(d, dtype=np.int32) for s, d in (drafts or {}).items()}
    planned = scheduler.schedule(None, given)
    check_invariants(scheduler)
    return planned


def answer(scheduler: Scheduler, *rows: list[int], bad_rows: tuple[int, ...] = ()) -> StepOutputs:
    oldest = scheduler.oldest_in_flight
    assert oldest is not None
    tokens = np.array([token for row in rows for token in row], dtype=np.int32)
    counts = np.array([len(row) for row in rows], dtype=np.int32)
    result = StepResult(oldest.step_id, tokens, bad_rows, num_sampled=counts)
    outputs = scheduler.update(result)
    check_invariants(scheduler)
    return outputs


def decoding(*names: str, **fields: object) -> Scheduler:
    """A scheduler whose requests have one token each, in slots 0 and on."""
    scheduler = make(**fields)
    for name in names:
        add(scheduler, name, max_tokens=12, stop_token_ids=(99,))
    assert plan(scheduler) is not None
    answer(scheduler, *([50] for _ in names))
    return scheduler


def test_a_row_advances_by_what_came_true() -> None:
    scheduler = decoding("a")
    step = plan(scheduler, {0: [1, 2, 3]})
    assert step is not None and step.num_scheduled is not None
    assert step.num_scheduled.tolist() == [4] and step.drafts[0].tolist() == [1, 2, 3]
    assert plan(scheduler, {0: [9]}) is None, "how far it is, only the answer says"
    outputs = answer(scheduler, [1, 2, 4])
    assert outputs.token_ids.tolist() == [1, 2, 4]
    following = plan(scheduler)
    assert following is not None and following.num_computed.tolist() == [9]
    counters = scheduler.counters
    assert (counters.num_drafts, counters.num_drafted_tokens) == (1, 3)
    assert counters.num_accepted_tokens == 2


def test_other_rows_go_on_while_a_row_awaits_its_range() -> None:
    scheduler = decoding("a", "b")
    assert plan(scheduler, {0: [1, 2]}) is not None
    ahead = plan(scheduler, {0: [3]})
    assert ahead is not None and ahead.slots.tolist() == [1]
    assert not scheduler.grant(4)
    answer(scheduler, [1, 7], [60])
    both = plan(scheduler, {0: [3]})
    assert both is not None and sorted(both.slots.tolist()) == [0, 1]


def test_a_stop_token_among_the_accepted_ends_the_output_there() -> None:
    scheduler = decoding("a")
    plan(scheduler, {0: [1, 99, 3]})
    outputs = answer(scheduler, [1, 99, 3, 4])
    assert outputs.token_ids.tolist() == [1, 99]
    (end,) = outputs.finished
    assert end.reason is FinishReason.STOP and end.num_output_tokens == 3


def test_drafts_end_before_the_last_token_allowed() -> None:
    scheduler = make()
    add(scheduler, "a", max_tokens=4)
    plan(scheduler)
    answer(scheduler, [50])
    step = plan(scheduler, {0: [1, 2, 3, 4, 5]})
    assert step is not None and step.drafts[0].tolist() == [1, 2]
    (end,) = answer(scheduler, [1, 2, 3]).finished
    assert end.reason is FinishReason.LENGTH and end.num_output_tokens == 4


def test_a_row_that_fails_after_accepted_tokens_keeps_them() -> None:
    scheduler = decoding("a")
    plan(scheduler, {0: [1, 2, 3]})
    outputs = answer(scheduler, [1, 2, 0], bad_rows=(2,))
    assert outputs.token_ids.tolist() == [1, 2]
    assert outputs.finished[0].reason is FinishReason.ERROR


def test_drafts_take_no_block_from_another_sequence() -> None:
    # 5 blocks: two each, and one more.
    scheduler = decoding("a", "b", num_blocks=6, max_num_seqs=8, enable_prefix_caching=False)
    step = plan(scheduler, {0: [1, 2, 3], 1: [1, 2, 3]})
    assert step is not None and not step.drafts and not step.preempted
    answer(scheduler, [60], [61])
    step = plan(scheduler, {0: [1, 2, 3]})
    assert step is not None and len(step.drafts[0]) == 3 and not step.preempted


def test_a_step_samples_at_no_more_positions_than_there_are_slots() -> None:
    scheduler = decoding("a", "b", max_num_seqs=7)
    step = plan(scheduler, {0: [1, 2, 3], 1: [4, 5, 6]})
    assert step is not None
    assert {slot: len(given) for slot, given in step.drafts.items()} == {0: 3, 1: 2}
    answer(scheduler, [7], [7])
    for name in "cde":
        add(scheduler, name, max_tokens=12)
    step = plan(scheduler, {0: [1, 2, 3], 1: [4, 5, 6]})
    assert step is not None, "five rows leave room for two drafts"
    assert len(step.slots) == 5
    assert {slot: len(given) for slot, given in step.drafts.items()} == {0: 2}


def test_nothing_is_drafted_in_place_of_a_sequence_that_may_enter() -> None:
    scheduler = decoding("a", max_num_seqs=2)
    add(scheduler, "b")
    step = plan(scheduler, {0: [1, 2, 3]})
    assert step is not None and not step.drafts and len(step.slots) == 2


def test_what_is_swapped_out_while_it_is_verified_is_computed_again() -> None:
    scheduler = decoding("a", preemption=Preemption.SWAP, num_host_blocks=20)
    plan(scheduler, {0: [1, 2, 3]})
    sequence = scheduler.find("a")
    assert sequence is not None
    scheduler.internal_state.preempt(sequence)
    scheduler.internal_state.renew_running()
    check_invariants(scheduler)
    assert not scheduler.view.num_swapped_out
    outputs = answer(scheduler, [1, 8])
    assert outputs.token_ids.tolist() == [1, 8] and not sequence.num_awaited
    again = plan(scheduler)
    assert again is not None and again.new_sequences[0].token_ids[-3:].tolist() == [50, 1, 8]


def test_only_accepted_tokens_are_found_by_others() -> None:
    scheduler = decoding("a")
    plan(scheduler, {0: [1, 2, 3]})
    answer(scheduler, [7])
    known = [*PROMPT, 20, 50]
    for following, num_cached in (([1, 2, 3, 0], 4), ([7, 0, 0, 0], 4)):
        sequence = scheduler.find("a")
        assert sequence is not None
        other = Request("other", np.array([*known, *following], dtype=np.int32), handle=9)
        waiting = scheduler.add(other)
        assert scheduler.num_cached_tokens(waiting) == num_cached
        scheduler.abort("other")
    plan(scheduler, {0: [30, 31]})
    answer(scheduler, [30, 31, 32])
    waiting = scheduler.add(Request("same", np.array([*known, 7, 30, 31], dtype=np.int32)))
    assert scheduler.num_cached_tokens(waiting) == 8
