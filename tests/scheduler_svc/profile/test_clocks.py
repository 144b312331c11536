"""The distance of two clocks, by what must have come before what."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.profile.clocks import ClockBounds

NS = st.integers(1, 10**9)


@given(st.integers(-(10**15), 10**15), st.lists(st.tuples(NS, NS, NS, NS), min_size=1, max_size=20))
def test_the_true_distance_is_within_the_error(
    offset: int, steps: list[tuple[int, int, int, int]]
) -> None:
    bounds, now_ns = ClockBounds(-(1 << 63), 1 << 63), 10**12
    for pause, up, computing, down in steps:
        sent = now_ns + pause
        begun, done = sent + up, sent + up + computing
        bounds.after(sent, begun - offset)  # the worker's clock shows so much less
        bounds.before(done - offset, done + down)
        now_ns = done + down
    assert abs(bounds.offset_ns - offset) <= bounds.error_ns
    least_up, least_down = min(s[1] for s in steps), min(s[3] for s in steps)
    assert bounds.error_ns <= (least_up + least_down) // 2 + 1
