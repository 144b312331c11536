"""The scheduler's pure core: events in, plans out.

It handles integers: token ids, block ids, slots. It imports numpy and xxhash, and nothing that
could read a clock, open a socket or draw a random number. Start reading at `scheduler.Scheduler`,
then `planner`, `state`, `slots`, `block_pool`, `prefix_cache`.
"""

from scheduler_svc.core.history.losses import hopeless
from scheduler_svc.core.kv.block_moves import BlockMoves
from scheduler_svc.core.kv.pulls import BlockPull, LentBlocks, PullOrders
from scheduler_svc.core.kv.transfers import BlockTransfer, TransferOrders
from scheduler_svc.core.queue.requirement_waits import Preparation, Preparations
from scheduler_svc.core.request.config import CachePolicy, Policy, Preemption, SchedulerConfig
from scheduler_svc.core.request.kv_groups import KvGroup
from scheduler_svc.core.request.request import (
    Extra,
    FinishReason,
    RefusalKind,
    Refused,
    Request,
)
from scheduler_svc.core.request.requirement import GRAMMAR, Requirement, RequirementKind
from scheduler_svc.core.request.sequence import Sequence, Status
from scheduler_svc.core.request.session_hint import SessionHint
from scheduler_svc.core.request.timeline import Phase, Timeline
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step.grants import Cut
from scheduler_svc.core.step.plan import (
    AdmissionHold,
    Cause,
    Drafts,
    EnteringSequence,
    Finished,
    OutOfStep,
    PromptOutputDelivery,
    PromptOutputRange,
    ReceivedPromptOutput,
    StepOutputs,
    StepPlan,
    StepResult,
)

__all__ = [
    "GRAMMAR",
    "AdmissionHold",
    "BlockMoves",
    "BlockPull",
    "BlockTransfer",
    "CachePolicy",
    "Cause",
    "Cut",
    "Drafts",
    "EnteringSequence",
    "Extra",
    "FinishReason",
    "Finished",
    "KvGroup",
    "LentBlocks",
    "OutOfStep",
    "Phase",
    "Policy",
    "Preemption",
    "Preparation",
    "Preparations",
    "PromptOutputDelivery",
    "PromptOutputRange",
    "PullOrders",
    "ReceivedPromptOutput",
    "RefusalKind",
    "Refused",
    "Request",
    "Requirement",
    "RequirementKind",
    "Scheduler",
    "SchedulerConfig",
    "Sequence",
    "SessionHint",
    "Status",
    "StepOutputs",
    "StepPlan",
    "StepResult",
    "Timeline",
    "TransferOrders",
    "hopeless",
]
