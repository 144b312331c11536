"""A core that reports every call that changes it to a callback.

The lists below are complete: a test compares them with the methods of `Scheduler`, so that a new
call which is neither an event nor a question cannot go unrecorded.
"""

from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial
from typing import Any, TypeVar

from scheduler_svc.core import (
    Cut,
    Drafts,
    Finished,
    Preparations,
    Refused,
    Request,
    Scheduler,
    SchedulerConfig,
    Sequence,
    StepOutputs,
    StepPlan,
    StepResult,
    TransferOrders,
)
from scheduler_svc.core.history.migration import Migration, MovedSequence
from scheduler_svc.core.kv.chain import Keys
from scheduler_svc.core.kv.pulls import LentBlocks, PullOrders
from scheduler_svc.core.queue.deadlines import Deadlines
from scheduler_svc.core.step.grants import Grants
from scheduler_svc.core.step.peer_moves import PeerMoves
from scheduler_svc.core.step.plan import NO_DRAFTS
from scheduler_svc.core.step.state import SchedulerState
from scheduler_svc.core.step.transfers import Transfers
from scheduler_svc.journal.older import CALLS

# Calls that change the core. `now_s` is the property being set; those of `_MOVES` are methods of
# `migration`, those of `_TRANSFERS` of `transfers`, and those of `_PEER_MOVES` of `peer_moves`.
EVENTS = frozenset(
    (
        "abort",
        "add",
        "begin_move",
        "give_back",
        "migrate_moved",
        "pull_done",
        "source_lost",
        "take_pulls",
        "ask_disk",
        "close",
        "migrate_in",
        "migrate_waiting",
        "reopen",
        "cut",
        "end_session",
        "expire",
        "fail",
        "give_up",
        "grant",
        "hear_disk",
        "judge_loss",
        "migrate_out",
        "now_s",
        "prepared",
        "reserve",
        "release",
        "reset_prefix_cache",
        "salvage",
        "schedule",
        "set_priority",
        "skip",
        "take_preparations",
        "take_transfers",
        "transfer_done",
        "update",
        "worker_back",
        "worker_lost",
    )
)
# Used only by a replay of replaced tokens: which token ends a request is known once it has.
SET_STOP_IDS = "set_stop_ids"
# Calls and properties that only read.
QUESTIONS = frozenset(
    (
        "can_hold",
        "has_room",
        "may_move",
        "num_lent",
        "take_ended_loans",  # notes for those outside, on which no plan depends
        "counts",
        "disk_counts",
        "find",
        "follow_caches",  # notes for those outside, on which no plan depends
        "is_cutting",
        "last_step_id",
        "live",
        "misfits",
        "next_deadline_s",
        "next_due_s",
        "num_cached_tokens",
        "num_cached_tokens",
        "num_disk_blocks",
        "num_held_disk_blocks",
        "num_held_tier_blocks",
        "num_in_flight",
        "num_running",
        "num_tier_blocks",
        "num_waiting",
        "oldest_in_flight",
        "take_cache_changes",
    )
)

_TRANSFERS = ("ask_disk", "hear_disk", "take_transfers", "transfer_done")
_MOVES = ("close", "migrate_in", "migrate_moved", "migrate_out", "migrate_waiting", "reopen")
_PEER_MOVES = ("begin_move", "give_back", "pull_done", "source_lost", "take_pulls")

Answer = TypeVar("Answer")
# Receives the name of a call, its arguments, its answer, and the refusal that it raised instead.
Tap = Callable[[str, tuple[Any, ...], Any, Refused | None], None]
# Parts of a core that others read, and that change only through events.
PARTS = frozenset(
    (
        "config",
        "counters",
        "intake",
        "migration",
        "output_lengths",
        "recent",
        "internal_state",
        "peer_moves",
        "transfers",
        "view",
    )
)


class UnknownCall(ValueError):
    """Raised for an event that this version of the core does not have."""


def perform(core: Scheduler, call: str, arguments: tuple[Any, ...]) -> Any:
    """Performs an event's call on a core and returns its answer."""
    call = CALLS.get(call, call)
    if call == "now_s":
        (core.now_s,) = arguments
        return None
    if call == SET_STOP_IDS:
        return _set_stop_ids(core, *arguments)
    if call not in EVENTS:
        raise UnknownCall(f"{call} is no call of this version of the core")
    owner: Any = core.migration if call in _MOVES else core
    if call in _TRANSFERS:
        owner = core.transfers
    if call in _PEER_MOVES:
        owner = core.peer_moves
    return getattr(owner, call)(*arguments)


def _set_stop_ids(
    core: Scheduler, request_id: str, stop_ids: tuple[int, ...], min_len: int = 0
) -> None:
    """Replaces the stop tokens of a live request, which stop it from `min_len` tokens on."""
    sequence = core.find(request_id)
    if sequence is not None:
        sequence.stop_ids = stop_ids
        sequence.min_len = max(sequence.min_len, min_len)
        if sequence.slot is not None:
            table = core.internal_state.table
            table.enter_stops(sequence.slot, stop_ids)
            table.min_len[sequence.slot] = sequence.min_len


class TappedScheduler(Scheduler):
    """Reports each event after it has happened; calls made inside an event are part of it."""

    def __init__(self, config: SchedulerConfig, tap: Tap) -> None:
        self._tap = tap
        self._is_inside = True  # calls of the constructor are no events
        super().__init__(config)
        self.migration = _TappedMigration(
            self.internal_state, self._live, self._deadlines, self._tell
        )
        self.transfers = _TappedTransfers(self.internal_state, self._tell)
        self.peer_moves = _TappedPeerMoves(
            self.internal_state, self._live, self._grants, self._tell
        )
        self._is_inside = False

    def _tell(self, event: str, call: Callable[..., Answer], *arguments: Any) -> Answer:
        if self._is_inside:
            return call(*arguments)
        self._is_inside = True
        try:
            answer = call(*arguments)
        except Refused as refused:
            self._tap(event, arguments, None, refused)
            raise
        finally:
            self._is_inside = False
        self._tap(event, arguments, answer, None)
        return answer

    @property
    def now_s(self) -> float:
        return super().now_s

    @now_s.setter
    def now_s(self, now_s: float) -> None:
        set_now_s: Any = vars(Scheduler)["now_s"].__set__  # super() has no setters
        self._tell("now_s", partial(set_now_s, self), now_s)

    def add(self, request: Request) -> Sequence:
        return self._tell("add", super().add, request)

    def reserve(self, request: Request, due_s: float) -> None:
        self._tell("reserve", super().reserve, request, due_s)

    def abort(self, request_id: str) -> Finished | None:
        return self._tell("abort", super().abort, request_id)

    def set_priority(self, request_id: str, priority: int) -> Sequence | None:
        return self._tell("set_priority", super().set_priority, request_id, priority)

    def reset_prefix_cache(self) -> int:
        return self._tell("reset_prefix_cache", super().reset_prefix_cache)

    def end_session(self, session_id: str, cache_salt: str = "") -> None:
        self._tell("end_session", super().end_session, session_id, cache_salt)

    def expire(self, now_s: float) -> list[Finished]:
        return self._tell("expire", super().expire, now_s)

    def schedule(
        self, most_prompt_tokens: int | None = None, drafts: Drafts = NO_DRAFTS
    ) -> StepPlan | None:
        if drafts:
            return self._tell("schedule", super().schedule, most_prompt_tokens, drafts)
        limit = () if most_prompt_tokens is None else (most_prompt_tokens,)
        return self._tell("schedule", super().schedule, *limit)

    def release(self) -> StepPlan | None:
        return self._tell("release", super().release)

    def grant(self, max_steps: int) -> tuple[StepPlan, ...]:
        return self._tell("grant", super().grant, max_steps)

    def cut(self, num_kept: int = 0) -> Cut | None:
        return self._tell("cut", super().cut, num_kept)

    def skip(self, first_step_id: int, last_step_id: int) -> int:
        return self._tell("skip", super().skip, first_step_id, last_step_id)

    def update(self, result: StepResult) -> StepOutputs:
        return self._tell("update", super().update, result)

    def take_preparations(self) -> Preparations | None:
        return self._tell("take_preparations", super().take_preparations)

    def prepared(self, preparation_id: int, problem: str = "") -> Finished | None:
        return self._tell("prepared", super().prepared, preparation_id, problem)

    def worker_lost(
        self,
        num_blocks: int | None = None,
        num_host_blocks: int | None = None,
        is_death: bool = False,
        num_state_snapshots: int | None = None,
        num_tier_blocks: int | None = None,
        keeps_tier: bool = False,
        num_disk_blocks: int | None = None,
    ) -> int:
        worker = num_blocks, num_host_blocks, is_death, num_state_snapshots, num_tier_blocks
        tiers = keeps_tier, num_disk_blocks
        return self._tell("worker_lost", super().worker_lost, *worker, *tiers)

    def judge_loss(self, is_death: bool) -> None:
        self._tell("judge_loss", super().judge_loss, is_death)

    def salvage(self, at_fault: Iterable[str], message: str) -> list[Finished]:
        return self._tell("salvage", super().salvage, list(at_fault), message)

    def give_up(self, why: str) -> list[Finished]:
        return self._tell("give_up", super().give_up, why)

    def worker_back(self) -> None:
        self._tell("worker_back", super().worker_back)

    def fail(self, request_ids: Iterable[str], message: str) -> list[Finished]:
        return self._tell("fail", super().fail, list(request_ids), message)


class _TappedMigration(Migration):
    """Reports the migration of sequences from and to other cores."""

    def __init__(
        self,
        state: SchedulerState,
        live: dict[str, Sequence],
        deadlines: Deadlines,
        tell: Callable[..., Any],
    ) -> None:
        super().__init__(state, live, deadlines)
        self._tell = tell

    def close(self) -> None:
        self._tell("close", super().close)

    def reopen(self) -> None:
        self._tell("reopen", super().reopen)

    def migrate_waiting(self) -> list[Sequence]:
        leaving: list[Sequence] = self._tell("migrate_waiting", super().migrate_waiting)
        return leaving

    def migrate_out(self) -> list[Sequence]:
        leaving: list[Sequence] = self._tell("migrate_out", super().migrate_out)
        return leaving

    def migrate_moved(self, source: str) -> list[MovedSequence]:
        moved: list[MovedSequence] = self._tell("migrate_moved", super().migrate_moved, source)
        return moved

    def migrate_in(self, sequence: Sequence, lent: LentBlocks | None = None) -> None:
        as_it_came = deepcopy(sequence)  # recorded as it arrived, before it changes
        migrate_in = super().migrate_in
        more = () if lent is None else (lent,)
        self._tell("migrate_in", lambda _, *lent: migrate_in(sequence, *lent), as_it_came, *more)


class _TappedTransfers(Transfers):
    """Reports what is ordered of a tier, and what came of it."""

    def __init__(self, state: SchedulerState, tell: Callable[..., Any]) -> None:
        super().__init__(state)
        self._tell = tell

    def take_transfers(
        self, s_per_block: float = 0.0, s_per_disk_block: float = 0.0
    ) -> TransferOrders | None:
        took_s = s_per_block, s_per_disk_block
        orders: TransferOrders | None = self._tell(
            "take_transfers", super().take_transfers, *took_s
        )
        return orders

    def ask_disk(self, is_asked: bool) -> None:
        self._tell("ask_disk", super().ask_disk, is_asked)

    def hear_disk(self, keys: Keys) -> None:
        self._tell("hear_disk", super().hear_disk, keys)

    def transfer_done(self, transfer_id: int, num_blocks: int) -> None:
        self._tell("transfer_done", super().transfer_done, transfer_id, num_blocks)


class _TappedPeerMoves(PeerMoves):
    """Reports what moves with its KV, and what came of it."""

    def __init__(
        self,
        state: SchedulerState,
        live: dict[str, Sequence],
        grants: Grants,
        tell: Callable[..., Any],
    ) -> None:
        super().__init__(state, live, grants)
        self._tell = tell

    def begin_move(self, request_id: str) -> bool:
        has_begun: bool = self._tell("begin_move", super().begin_move, request_id)
        return has_begun

    def give_back(self, loan_id: int) -> None:
        self._tell("give_back", super().give_back, loan_id)

    def take_pulls(self, s_per_block: float = 0.0) -> PullOrders | None:
        orders: PullOrders | None = self._tell("take_pulls", super().take_pulls, s_per_block)
        return orders

    def pull_done(self, transfer_id: int, num_blocks: int) -> None:
        self._tell("pull_done", super().pull_done, transfer_id, num_blocks)

    def source_lost(self, source: str) -> None:
        self._tell("source_lost", super().source_lost, source)
