"""Watches a link while it is used: for silence, for steps that take too long, for the end of a
drain."""

import asyncio
import time
from collections.abc import Callable

from scheduler_svc.core import Scheduler
from scheduler_svc.worker.link import WorkerLink
from scheduler_svc.worker.pace import Pace
from scheduler_svc.worker.watch import TICK_S
from wire.deaths import PeerLoss


async def watch_over(
    link: WorkerLink,
    core: Scheduler,
    pace: Pace,
    step_timeout_s: float,
    is_let_go: Callable[[], bool],
) -> None:
    """Loses the link when the worker is silent or takes too long for a step; returns then.

    Returns, too, once `is_let_go` says that the link is not needed any more.
    """
    before_s = time.monotonic()
    while not is_let_go():
        await asyncio.sleep(TICK_S)
        now_s = time.monotonic()
        elapsed_s, before_s = now_s - before_s, now_s
        oldest = core.oldest_in_flight
        step_s = link.watch.step_s(oldest.step_id if oldest else None, elapsed_s)
        why, loss = link.watch.tick(elapsed_s), PeerLoss.UNCLEAR
        if oldest is not None and step_s > step_timeout_s:
            limit_s = pace.timeout_s(oldest, step_timeout_s)
            if step_s > limit_s:
                pace.gave_up(oldest, step_s)
                why = f"no answer to step {oldest.step_id} within {limit_s:.1f} s"
                loss = PeerLoss.DEATH if link.watch.is_heard else PeerLoss.UNCLEAR
        if link.s_since_cancel(min(elapsed_s, 2 * TICK_S)) > step_timeout_s:
            why = f"no answer to a transfer within {step_timeout_s:.1f} s of its cancellation"
            loss = PeerLoss.DEATH if link.watch.is_heard else PeerLoss.UNCLEAR
        if why:
            link.lose(why, loss)
            return


def is_drained(core: Scheduler) -> bool:
    """True if no sequence runs, or has run and waits to go on here, and no KV is read here."""
    if core.num_running or core.num_in_flight or core.is_cutting or core.peer_moves.num_lent:
        return False
    return not any(sequence.has_run for sequence in core.live())
