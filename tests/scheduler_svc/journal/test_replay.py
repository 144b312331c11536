"""A recording replays to the same plans, and a difference is found."""

from collections import Counter
from pathlib import Path

import pytest

from scheduler_svc.journal import records, segments
from scheduler_svc.journal.recording import Recording
from scheduler_svc.journal.replay import compare, replay
from scheduler_svc.journal.values import BadValues, as_read, encode
from tests.scheduler_svc.journal.recorded import Run


@pytest.mark.parametrize("is_masked", [False, True], ids=["kept", "replaced"])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_happened_replays_to_the_same_plans(
    tmp_path: Path, seed: int, is_masked: bool
) -> None:
    run = Run(tmp_path / "r", f"replay/{seed}", is_masked=is_masked)
    run.act(500)
    scheduler = run.world.scheduler
    while "worker_lost" not in run.calls or scheduler.counters.num_steps <= 100:
        run.act(50)  # what is lost is the rarest of the rules
    run.close()
    report = replay(Recording(tmp_path / "r"))
    assert report.divergence is None, str(report.divergence)
    called = Counter(run.calls)
    # Granted steps that were lost with their worker were planned, and never counted.
    assert report.num_steps >= scheduler.counters.num_steps > 100
    assert report.num_tokens == scheduler.num_output_tokens
    assert report.num_workers_lost == called["worker_lost"]
    if not is_masked:
        assert report.num_events == len(run.calls)


@pytest.mark.parametrize("seed", range(3))
def test_a_core_that_is_written_and_read_goes_on_as_if_nothing_had_been(
    tmp_path: Path, seed: int
) -> None:
    run = Run(tmp_path / "r", f"snapshot/{seed}", is_masked=False)
    run.act(300)
    run.close()
    recording = Recording(tmp_path / "r")
    core = recording.restore()
    for number, stored in enumerate(recording.events()):
        if number % 23 == 0:
            core = as_read(core)
        divergence = compare(stored.event, core)
        assert divergence is None, str(divergence)


@pytest.mark.parametrize("is_masked", [False, True], ids=["kept", "replaced"])
def test_what_moves_to_another_scheduler_replays_on_both_sides(
    tmp_path: Path, is_masked: bool
) -> None:
    names = ("lost", "taking over")
    lost, other = (Run(tmp_path / name, "move", is_masked=is_masked) for name in names)
    while lost.world.scheduler.num_running < 2 or not lost.world.scheduler.num_output_tokens:
        lost.act(5)
    scheduler, migration = lost.world.scheduler, other.world.scheduler.migration
    scheduler.worker_lost()
    leaving = [s for s in scheduler.migration.migrate_out() if migration.can_hold(s)]
    for sequence in reversed(leaving):  # the worker may have been replaced by a larger one
        migration.migrate_in(sequence)
    assert leaving and "migrate_in" in other.calls
    for _ in range(300):
        other.world.ask_for_requirements()
        for preparation_id in list(other.world.worker.preparing):
            other.world.answer_preparation(preparation_id)
        other.world.schedule()
        while other.world.results:
            answer = other.world.results.popleft()
            other.world.scheduler.update(answer)
    assert not list(other.world.scheduler.live())
    for run in (lost, other):
        run.close()
        report = replay(Recording(run.folder))
        assert report.divergence is None, str(report.divergence)
        assert report.num_events >= len(run.calls)


@pytest.mark.parametrize("call", ["expire", "update", "now_s", "add", "abort"])
def test_an_event_with_the_arguments_of_another_call_is_refused(call: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "r", "forged", is_masked=False)
    run.act(20)
    run.close()
    path = segments.segment_path(tmp_path / "r", 1)
    header, event = (stored.record for stored in list(records.read(path))[:2])
    event.event.call = call
    event.event.arguments.CopyFrom(encode(()))
    path.write_bytes(records.pack(header) + records.pack(event))
    with pytest.raises(BadValues, match=call):
        replay(Recording(tmp_path / "r"))
