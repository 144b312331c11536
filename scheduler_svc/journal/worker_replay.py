"""Sends the steps of a recording to a worker and compares its tokens with the recorded ones.

Steps and answers keep their recorded order: where the scheduler had planned two steps before the
first result, so does the replay. Where the worker was lost, the stream begins anew.
"""

import asyncio
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewire.v1 import worker_pb2
from pagewire.v1.journal_pb2 import JournalEvent
from scheduler_svc.convert import to_result
from scheduler_svc.core import StepResult
from scheduler_svc.journal.events import arguments_of
from scheduler_svc.journal.recording import NotReplayable, Recording
from scheduler_svc.journal.replay import Divergence, ReplayReport, is_answer_to
from scheduler_svc.worker.link import LinkLost, WorkerClient, WorkerLink
from scheduler_svc.worker.served import groups_in_words
from wire.columns import unpack

_HEARTBEAT_TIMEOUT_S = 10.0
# Limits that must be at least those of the recorded worker.
_NO_LESS = (
    "num_blocks",
    "num_host_blocks",
    "num_state_snapshots",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_granted_steps",
)


@dataclass(frozen=True, slots=True)
class _Sent:
    """A step in flight, with the requests that its tokens belong to."""

    step_id: int | None  # as recorded; None: not recorded, its answer is ignored
    slots: list[int]
    request_ids: list[str]


async def replay_on(
    recording: Recording, address: str, step_timeout_s: float, to_step: int | None = None
) -> ReplayReport:
    """Replays from the first step on a fresh worker, up to the first divergence or `to_step`.

    Raises NotReplayable, Damaged, BadValues, or LinkLost when the worker cannot be used.
    """
    if recording.header.prompts_replaced:
        raise NotReplayable(
            "the prompts of this recording were replaced, so no worker would answer with its "
            "tokens; record with --record-prompts keep"
        )
    client = WorkerClient(address, _HEARTBEAT_TIMEOUT_S)
    try:
        return await _WorkerReplay(recording, client, step_timeout_s).run(to_step)
    finally:
        await client.close()


class _WorkerReplay:
    """One recording and one worker."""

    def __init__(self, recording: Recording, client: WorkerClient, step_timeout_s: float) -> None:
        self._recording = recording
        self._client = client
        self._step_timeout_s = step_timeout_s
        self._link: WorkerLink | None = None
        self._in_flight: deque[_Sent] = deque()
        self._next_step_id = 1  # of the replay: skipped steps have none
        self._occupants: dict[int, str] = {}  # slot to request id
        self._skipped: set[int] = set()
        self._report = ReplayReport()

    async def run(self, to_step: int | None = None) -> ReplayReport:
        try:
            num_left_out = await self._run(to_step)
        finally:
            await self._detach()
        if not self._report.num_steps and self._report.divergence is None:
            raise NotReplayable(
                f"none of the {num_left_out} steps of this recording is the first on a worker: its "
                "beginning was cut off (--record-max-mib)"
            )
        if num_left_out:
            note = f"the first {num_left_out} steps were left out: their worker's were cut off"
            self._report.notes.append(note)
        return self._report

    async def _run(self, to_step: int | None) -> int:
        """Returns the number of steps before the first one that begins on a fresh worker."""
        report, num_left_out = self._report, 0
        self._skipped = self._find_skipped()
        for stored in self._recording.events():
            event = stored.event
            if self._link is None and not event.step.reset:
                num_left_out += event.HasField("step") and not report.num_steps
                continue
            report.divergence = await self._do(event)
            if report.divergence is not None:
                break
            report.count(event)
            if is_answer_to(event, to_step):
                break
        return num_left_out

    def _find_skipped(self) -> set[int]:
        """Ids of steps that were granted and taken back; the replay does not grant them."""
        skipped: set[int] = set()
        for stored in self._recording.events():
            if stored.event.call == "skip":
                first, last = arguments_of(stored.event)
                skipped.update(range(first, last + 1))
        return skipped

    async def _do(self, event: JournalEvent) -> Divergence | None:
        if event.HasField("step"):
            await self._send(event)
        elif event.call == "update":
            (result,) = arguments_of(event)
            return await self._receive(event, result)
        elif event.call == "worker_lost":
            await self._detach()
        return None

    # --- steps out -------------------------------------------------------------------------------

    async def _send(self, event: JournalEvent) -> None:
        if event.step.reset:
            await self._detach()
            self._link = await self._attach()
        for new in event.step.new_sequences:
            self._occupants[new.slot] = new.request_id
        slots = unpack(event.plan.sampled_slots).tolist()
        request_ids = [self._occupants[slot] for slot in slots]
        first, count = event.step.step_id, max(event.step.granted_steps, 1)
        kept = [i for i in range(first, first + count) if i not in self._skipped]
        assert self._link is not None
        await self._link.send(self._frame(event.step, len(kept)))
        sent = [_Sent(step_id, slots, request_ids) for step_id in kept] or [_Sent(None, [], [])]
        self._in_flight.extend(sent)
        self._next_step_id += len(sent)

    def _frame(
        self, recorded: worker_pb2.SchedulerOutput, num_steps: int
    ) -> worker_pb2.SchedulerOutput:
        """The frame under the replay's step id; without rows if all its steps were skipped."""
        frame = worker_pb2.SchedulerOutput()
        frame.CopyFrom(recorded)
        frame.step_id = self._next_step_id
        frame.ack_step_id = self._next_step_id - 1 - len(self._in_flight)
        frame.granted_steps = num_steps if recorded.granted_steps else 0
        if not num_steps:
            frame.same_rows, frame.slots, frame.num_scheduled = False, b"", b""
        return frame

    # --- tokens in -------------------------------------------------------------------------------

    async def _receive(self, event: JournalEvent, recorded: StepResult) -> Divergence | None:
        answer: worker_pb2.ModelRunnerOutput | None = None
        sent = self._in_flight[0]
        while answer is None:
            sent = self._in_flight.popleft()
            where = f"event {event.number}, step {recorded.step_id}"
            try:
                output = await self._answer()
            except LinkLost as error:
                return Divergence(where, "the answer", "tokens", str(error))
            if output.error:
                return Divergence(where, "the answer", "tokens", output.error)
            answer = output if sent.step_id is not None else None
        return _compare(where, sent, recorded, to_result(answer))

    async def _answer(self) -> worker_pb2.ModelRunnerOutput:
        assert self._link is not None
        try:
            async with asyncio.timeout(self._step_timeout_s):
                answer = await self._link.receive()
        except TimeoutError as error:
            raise LinkLost(f"none within {self._step_timeout_s:g} s") from error
        if isinstance(answer, worker_pb2.Skipped):
            raise LinkLost("steps were skipped, though nothing was cut")
        return answer

    # --- the stream ------------------------------------------------------------------------------

    async def _attach(self) -> WorkerLink:
        epoch = await self._client.epoch()
        link = await self._client.attach(epoch + 1, self._next_step_id)
        try:
            self._check(link.attached.description)
        except NotReplayable:
            await link.close()
            raise
        return link

    async def _detach(self) -> None:
        if self._link is not None:
            await self._link.close()
        self._link = None
        self._in_flight.clear()

    def _check(self, worker: worker_pb2.WorkerDescription) -> None:
        """Raises NotReplayable unless the worker serves the same model with enough room."""
        recorded = self._recording.header.worker
        # Older recordings do not say.
        quantization = recorded.model.quantization or worker.model.quantization
        for what, ours, theirs in (
            ("config_sha256", recorded.model.config_sha256, worker.model.config_sha256),
            ("dtype", recorded.model.dtype, worker.model.dtype),
            ("quantization", quantization, worker.model.quantization),
            ("kv_dtype", recorded.kv_dtype, worker.kv_dtype),
            ("block_size", recorded.block_size, worker.block_size),
            ("kv_groups", groups_in_words(recorded), groups_in_words(worker)),
        ):
            if ours != theirs:
                raise NotReplayable(f"the worker's {what} is {theirs}, recorded was {ours}")
        if recorded.tiers:
            raise NotReplayable("blocks came from a tier: a worker is not given them again")
        for what in _NO_LESS:
            least, there = getattr(recorded, what), getattr(worker, what)
            if there < least:
                raise NotReplayable(f"the worker's {what} is {there}, recorded was {least}")
        note = f"recorded on {recorded.device}, replayed on {worker.device}: last bits may differ"
        if worker.device != recorded.device and note not in self._report.notes:
            self._report.notes.append(note)


def _compare(
    where: str, sent: _Sent, recorded: StepResult, answered: StepResult
) -> Divergence | None:
    if len(recorded.token_ids) != len(answered.token_ids):
        counts = str(len(recorded.token_ids)), str(len(answered.token_ids))
        return Divergence(where, "the number of tokens", *counts)
    differs = recorded.token_ids != answered.token_ids
    for is_bad, result in ((True, recorded), (False, answered)):
        for row in result.bad_rows:
            other = answered if is_bad else recorded
            differs[row] = row not in other.bad_rows
    rows = np.flatnonzero(differs)
    if not len(rows):
        return None
    row = int(rows[0])
    n = row if recorded.num_sampled is None else _nth_row(recorded.num_sampled, row)
    more = f", and {len(rows) - 1} more rows" if len(rows) > 1 else ""
    return Divergence(
        f"{where}, row {n}, slot {sent.slots[n]}, request {sent.request_ids[n]!r}{more}",
        "the token",
        _shown(recorded, row),
        _shown(answered, row),
    )


def _nth_row(num_sampled: NDArray[np.int32], token: int) -> int:
    """The row that has a token of a result, where rows have several."""
    return int(np.searchsorted(np.cumsum(num_sampled), token, side="right"))


def _shown(result: StepResult, row: int) -> str:
    return "logits not finite" if row in result.bad_rows else str(int(result.token_ids[row]))
