"""When a worker counts as lost, judged from frames alone."""

from pagewire.v1 import worker_pb2
from scheduler_svc.worker.watch import TICK_S, Watch, silence_patience


def beat(received: int, sent: int) -> worker_pb2.Heartbeat:
    return worker_pb2.Heartbeat(num_frames_received=received, num_frames_sent=sent)


def ticks_until_lost(watch: Watch, most: int = 100, elapsed_s: float = TICK_S) -> int:
    return next(number for number in range(1, most) if watch.tick(elapsed_s))


def test_silence_is_a_loss_after_the_timeout() -> None:
    assert ticks_until_lost(Watch(silence_patience(3.0))) == 13  # the first tick beyond 3 s


def test_any_frame_ends_the_silence() -> None:
    watch = Watch(silence_patience(3.0))
    for _ in range(5):
        for _ in range(12):
            assert watch.tick(TICK_S) is None
        assert watch.heartbeat_came(beat(0, 0)) is None
        for _ in range(12):
            assert watch.tick(TICK_S) is None
        watch.output_came()


def test_a_worker_that_sends_no_heartbeats_may_be_silent() -> None:
    watch = Watch(None)
    assert not any(watch.tick(TICK_S) for _ in range(1000))


def test_whoever_was_stopped_himself_does_not_blame_the_worker() -> None:
    watch = Watch(silence_patience(3.0))
    assert watch.tick(3600.0) is None


def test_an_output_that_did_not_come_is_noticed_with_the_next_heartbeat() -> None:
    watch = Watch(silence_patience(3.0))
    watch.frame_sent()
    watch.output_came()
    assert watch.heartbeat_came(beat(1, 1)) is None
    assert "an answer was lost" in str(watch.heartbeat_came(beat(1, 2)))


def test_a_step_that_did_not_arrive_is_noticed_after_a_second() -> None:
    watch = Watch(silence_patience(3.0))
    watch.frame_sent()
    assert watch.heartbeat_came(beat(0, 0)) is None  # it may be in flight
    reasons = []
    for _ in range(5):
        watch.tick(TICK_S)
        reasons.append(watch.heartbeat_came(beat(0, 0)))
    assert reasons[:3] == [None] * 3
    assert "a step was lost" in str(reasons[4])
    assert watch.heartbeat_came(beat(1, 0)) is None


def test_a_steps_time_begins_anew_with_the_next_step() -> None:
    watch = Watch(silence_patience(3.0))
    assert [watch.step_s(7, 0.25), watch.step_s(7, 0.25), watch.step_s(7, 0.25)] == [0, 0.25, 0.5]
    assert watch.step_s(8, 0.25) == 0
    assert watch.step_s(8, 3600.0) == 2 * TICK_S  # as above: this process was stopped
    assert [watch.step_s(None, 0.25), watch.step_s(8, 0.25)] == [0, 0]


def test_a_worker_whose_heartbeats_come_late_may_be_silent_for_longer() -> None:
    watch = Watch(silence_patience(3.0))
    for _ in range(8):
        watch.tick(TICK_S)
    watch.heartbeat_came(beat(0, 0))  # after 2 s
    assert 22 <= ticks_until_lost(watch) <= 25  # about 6 s


def test_however_late_they_come_a_worker_that_is_gone_is_noticed() -> None:
    watch = Watch(silence_patience(3.0))
    for _ in range(12):
        watch.tick(TICK_S)
    watch.heartbeat_came(beat(0, 0))
    for _ in range(30):
        watch.tick(TICK_S)
    watch.heartbeat_came(beat(0, 0))  # 7.5 s more
    assert ticks_until_lost(watch) <= 61  # 15 s


def test_a_worker_that_was_given_up_and_lived_may_be_silent_for_longer_on_its_next_link() -> None:
    patience = silence_patience(3.0)
    assert ticks_until_lost(Watch(patience)) == 13
    assert 20 <= ticks_until_lost(Watch(patience)) <= 25
    patience.forget()  # its process is another
    assert ticks_until_lost(Watch(patience)) == 13


def test_one_heartbeat_that_overtakes_the_reading_of_a_frame_is_no_loss() -> None:
    watch = Watch(silence_patience(3.0))
    watch.frame_sent()
    for _ in range(6):  # the worker stands still
        watch.tick(TICK_S)
    assert watch.heartbeat_came(beat(0, 0)) is None
    assert watch.heartbeat_came(beat(1, 0)) is None
    watch.tick(TICK_S)
    assert watch.heartbeat_came(beat(1, 0)) is None
