"""The questions about a core from outside: their answers, and that nothing goes around them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from scheduler_svc.core import Request, Scheduler, SchedulerConfig, StepResult

ROOT = Path(__file__).parents[3]
CONFIG = SchedulerConfig(
    num_blocks=9,
    block_size=4,
    max_num_seqs=2,
    max_num_batched_tokens=64,
    max_model_len=32,
    vocab_size=100,
    eos_token_ids=(1,),
)
# A recording's tap is a Scheduler itself, and a replay has to set the stop ids that it recorded.
MAY_LOOK_INSIDE = {"scheduler_svc/journal/calls.py"}


def looks_inside(source: str) -> Iterator[int]:
    """Lines that read a core's `state`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr == "internal_state":
            yield node.lineno


def test_nothing_outside_the_core_reads_its_state_but_through_the_view() -> None:
    folders = ("scheduler_svc", "simulator", "bench", "gateway", "worker_svc", "pagewire")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    names = {path: path.relative_to(ROOT).as_posix() for path in paths}
    outside = [path for path in paths if not names[path].startswith("scheduler_svc/core/")]
    found = {names[path] for path in outside if any(looks_inside(path.read_text()))}
    assert len(outside) > 100
    assert found == MAY_LOOK_INSIDE


def make_scheduler() -> Scheduler:
    """Three requests for two slots."""
    scheduler = Scheduler(CONFIG)
    for number, length in enumerate((5, 25, 3)):
        prompt = np.arange(length, dtype=np.int32) + 10 + 30 * number  # nothing in common
        scheduler.add(Request(f"r{number}", prompt, max_tokens=4))
    return scheduler


def test_the_view_counts_blocks_slots_and_tokens() -> None:
    scheduler = make_scheduler()
    view = scheduler.view
    assert (view.num_blocks, view.num_free_blocks, view.num_free_slots) == (8, 8, 2)
    assert view.num_waiting_tokens == 33
    assert [s.request.request_id for s in view.waiting] == ["r0", "r1", "r2"]
    plan = scheduler.schedule()
    assert plan is not None
    running = [sequence.request.request_id for sequence in view.running]
    assert view.num_free_blocks == 8 - sum(view.num_blocks_of(s) for s in view.running)
    assert view.block_usage == 1 - view.num_free_blocks / 8
    assert len(running) + len(list(view.waiting)) == 3
    assert len(view.live_slots()) == len(running) == 2 - view.num_free_slots
    assert view.is_slot_free().sum() == view.num_free_slots


def test_the_view_knows_each_sequences_tokens_and_blocks() -> None:
    scheduler = make_scheduler()
    first = scheduler.find("r0")
    assert first is not None
    assert scheduler.view.num_tokens(first) == 5
    assert scheduler.view.num_computed_tokens(first) == 0
    assert scheduler.view.block_ids(first) == []
    plan = scheduler.schedule()
    assert plan is not None and first.slot is not None
    sampled = np.full(len(plan.sampled_slots), 42, dtype=np.int32)
    scheduler.update(StepResult(plan.step_id, sampled))
    view = scheduler.view
    assert view.num_tokens(first) == 6 and view.token_ids[first.slot, 5] == 42
    assert view.num_computed_tokens(first) == 5 == view.num_computed[first.slot]
    assert len(view.block_ids(first)) == view.num_blocks_of(first) == 2
    assert view.sequence_in(first.slot) is first
    hold = {use.block_id: use for use in view.blocks()}
    for block_id in view.block_ids(first):
        assert (hold[block_id].ref_count, hold[block_id].request_ids) == (1, ["r0"])
    assert view.num_cached_blocks >= 1


def test_what_the_view_shows_cannot_be_written() -> None:
    view = make_scheduler().view
    columns = (
        view.num_computed,
        view.num_planned,
        view.num_blocks_by_slot,
        view.block_table,
        view.token_ids,
        view.running_slots(),
    )
    for column in columns:
        with pytest.raises(ValueError, match="read-only"):
            column[...] = 1


def test_the_view_follows_a_worker_that_is_replaced_by_a_smaller_one() -> None:
    scheduler = make_scheduler()
    view = scheduler.view
    assert not view.is_worker_away
    scheduler.worker_lost(num_blocks=5)
    assert view.is_worker_away and view.num_blocks == 4
