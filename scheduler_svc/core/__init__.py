"""The scheduler's pure core: events in, plans out.

It handles integers: token ids, block ids, slots. It imports numpy and xxhash, and nothing that
could read a clock, open a socket or draw a random number. Start reading at `scheduler.Scheduler`,
then `planner`, `residency`, `slots`, `block_pool`, `prefix_cache`.
"""

from scheduler_svc.core.block_moves import BlockMoves
from scheduler_svc.core.config import Policy, Preemption, SchedulerConfig
from scheduler_svc.core.grants import Cut
from scheduler_svc.core.losses import hopeless
from scheduler_svc.core.plan import (
    Cause,
    EnteringSequence,
    Finished,
    Held,
    OutOfStep,
    ReportDelivery,
    ReportedRange,
    ReportRange,
    StepOutputs,
    StepPlan,
    StepResult,
)
from scheduler_svc.core.request import FinishReason, RefusalKind, Refused, Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, Status
from scheduler_svc.core.timeline import Phase, Timeline

__all__ = [
    "BlockMoves",
    "Cause",
    "Cut",
    "EnteringSequence",
    "FinishReason",
    "Finished",
    "Held",
    "OutOfStep",
    "Phase",
    "Policy",
    "Preemption",
    "RefusalKind",
    "Refused",
    "ReportDelivery",
    "ReportRange",
    "ReportedRange",
    "Request",
    "Scheduler",
    "SchedulerConfig",
    "Sequence",
    "Status",
    "StepOutputs",
    "StepPlan",
    "StepResult",
    "Timeline",
    "hopeless",
]
