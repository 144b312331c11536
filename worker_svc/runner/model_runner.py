"""The transaction around a step: staged, launched, then committed or rolled back.

A step either works or leaves no trace. How it computes, and whether `launch` waits for the device,
is the middle that `EagerRunner` and `CudaRunner` add. Decides nothing and knows no protocol.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from wire.logprobs import LogprobColumns
from wire.versions import DISK_TIER, HOST_TIER
from worker_svc.attention.batch import LastTokens
from worker_svc.attention.kv_cache import PagedCache
from worker_svc.device.device import end_if_lost
from worker_svc.device.step_clock import DecodeTime, StepClock
from worker_svc.metrics.steps import StepCounts, kind_of
from worker_svc.models.step_model import StepModel
from worker_svc.observe.request_spans import RequestStays, StepRows
from worker_svc.observe.step_profile import ComputedRows, StepProfile
from worker_svc.protocol.preparations import PreparationOrders
from worker_svc.protocol.step import (
    ROW_DEAD_END,
    ROW_NOT_FINITE,
    ROW_OK,
    BadStep,
    ComputedStep,
    IntColumn,
    Limits,
    StepInput,
    StepOutput,
    StepTimings,
)
from worker_svc.runner.batch_state import BatchState, Staged
from worker_svc.runner.block_mover import BlockMover
from worker_svc.runner.disk_tier import DiskTier
from worker_svc.runner.draft_model import DraftModel
from worker_svc.runner.host_tier import HostTier
from worker_svc.runner.inputs import ModelInputs
from worker_svc.runner.picture_outputs import NO_ENCODER
from worker_svc.runner.rows import RowDrafts, Rows
from worker_svc.runner.state_saves import DueSaves
from worker_svc.runner.tier_copies import TierCopies
from worker_svc.sampling.grammars import Grammars
from worker_svc.sampling.prompt_outputs import DevicePromptOutput, Part, compute_prompt_outputs

MAX_RECORDS = 256

# What travels from the device in place of a token, below every token id.
NOT_FINITE, NO_CHOICE = -1, -2
NO_TOKEN_LEFT = (
    "no token is left to go on with: together, the request's grammar, min_tokens, "
    "allowed_token_ids, bad_words and logit_bias forbid every one"
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Samples at R positions, on the host."""

    tokens: NDArray[np.int32]  # [R]; below 0 it says why there is none
    logprobs: LogprobColumns | None = None
    problems: Mapping[int, str] = field(
        default_factory=dict
    )  # by position, of those that have no choice

    def select(self, kept: IntColumn) -> "Drawn":
        """Some of the positions, ascending."""
        logprobs = None if self.logprobs is None else self.logprobs.select(kept)
        problems = {n: self.problems[at] for n, at in enumerate(kept) if at in self.problems}
        return Drawn(self.tokens[kept], logprobs, problems)


class Pending(Protocol):
    """A step that has been started."""

    def result(self) -> StepOutput:
        """Waits for it, in any thread."""

    def record(self, output: StepOutput) -> None:
        """Records the step for the debug service; call it once, after the answer."""


class ModelRunner(ABC):
    """A loaded model with its cache and its slots; complete once built."""

    is_asynchronous: bool  # whether a launched step may still run on the device
    draft_model: DraftModel | None = None

    def __init__(
        self,
        model: StepModel,
        kv_cache: PagedCache,
        limits: Limits,
        device: torch.device,
        grammars: Grammars | None = None,
    ) -> None:
        self.limits = limits
        self.state = BatchState(limits, device, grammars or Grammars(limits.vocab_size))
        self.records: deque[ComputedStep] = deque(maxlen=MAX_RECORDS)  # newest last
        self.decode_time = DecodeTime()
        self.counts = StepCounts()
        self.stays: RequestStays | None = None  # while requests are traced
        self.recording: StepProfile | None = None  # while steps are recorded
        self.rehearsed_s: dict[int, float] = {}  # what steps of the warm-up took, by their tokens
        self._clock_before: StepClock | None = None  # of the last step that computed
        self._model = model
        self.kv_cache = kv_cache
        self._device = device
        self._mover = BlockMover(kv_cache, limits.num_host_blocks, device)
        self.host_tier: HostTier | None = None
        if limits.num_tier_blocks:
            self.host_tier = HostTier(kv_cache, limits.num_tier_blocks, device)
        self.disk_tier: DiskTier | None = None

    @property
    def tiers(self) -> dict[str, TierCopies]:
        """The tiers that there are, by name."""
        tiers = {HOST_TIER: self.host_tier, DISK_TIER: self.disk_tier}
        return {name: tier for name, tier in tiers.items() if tier is not None}

    @property
    def device(self) -> torch.device:
        """The device that it computes on."""
        return self._device

    @property
    def verifies_drafts(self) -> bool:
        """True if it verifies drafts: states, if there are any, go back over refused ones."""
        return self._model.states is None or self._model.settles_states

    @property
    def makes_drafts(self) -> bool:
        """True if it has a draft model."""
        return self.draft_model is not None

    @property
    def graph_batch_sizes(self) -> tuple[int, ...]:
        """Batch sizes with a captured graph."""
        return ()

    @torch.inference_mode()
    def launch(self, step: StepInput, queue_us: int = 0) -> StepOutput | Pending:
        """Starts one step. Raises BadStep, or answers with an error, without a trace of it."""
        started = time.perf_counter()
        self._check_starts(step)
        staged = self.state.stage(step)
        self._check_drafts(staged.rows.drafts)
        try:
            self._restore_states(step)
            launched = self._launch(staged, queue_us, started)
            self._save_states(staged.state_saves)
        except Exception as error:  # whatever the device raises, the process and the state live on
            log.exception("step %d failed", step.step_id)
            self._undo()
            self.end_if_lost(error)
            self._model.group.confirm_failure()
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
            launched = failed(step.step_id, f"{type(error).__name__}: {error}")
        else:
            self.state.commit(staged)
            if (states := self._model.states) is not None:
                states.commit(staged.rows.slots)
        if isinstance(launched, StepOutput):
            self.record(staged, launched, started)
        return launched

    def _check_starts(self, step: StepInput) -> None:
        """Raises BadStep for a sequence that begins after tokens whose states nothing holds."""
        if self._model.states is None:
            return
        for index, sequence in enumerate(step.new_sequences):
            if sequence.num_computed_tokens and not sequence.state_snapshot:
                raise BadStep(
                    f"new_sequences[{index}].state_snapshot",
                    f"is missing, and {sequence.num_computed_tokens} tokens are computed already",
                )

    def _restore_states(self, step: StepInput) -> None:
        """Has sequences that begin after a snapshot read it in place of their slot's states."""
        if (states := self._model.states) is None:
            return
        given = {s.slot: s.state_snapshot for s in step.new_sequences if s.state_snapshot}
        if given:
            states.restore(given)

    def _save_states(self, saves: DueSaves) -> None:
        """Copies the states of rows whose last token is where a snapshot is due."""
        if saves.at_ends and (states := self._model.states) is not None:
            states.save({due.slot: due.snapshot for due in saves.at_ends})

    def _check_drafts(self, drafts: RowDrafts | None) -> None:
        """Raises BadStep for drafts that this worker cannot verify or make."""
        if drafts is None:
            return
        if not self.verifies_drafts:
            raise BadStep("num_drafted", "this worker verifies no drafts")
        if drafts.are_made_here and not self.makes_drafts:
            raise BadStep("draft_token_ids", "is empty, and this worker has no draft model")

    def prepare(self, orders: PreparationOrders, answer: Callable[[int, str], None]) -> None:
        """Starts to prepare grammars, and lines up pictures, which `encode_pictures` encodes.

        `answer` is called, from any thread, with each preparation and its problem, "" without one.
        """
        grammars, pictures = self.state.grammars, self.state.pictures
        grammars.take_orders(orders, answer)
        if pictures is not None:
            pictures.take_orders(orders, answer)
            return
        for order in orders.pictures:
            answer(order.preparation_id, NO_ENCODER)

    @torch.inference_mode()
    def encode_pictures(self) -> bool:
        """Encodes pictures for one turn between steps; True if the next turn would go on."""
        return self.state.pictures is not None and self.state.pictures.encode_some()

    @property
    def has_pictures_waiting(self) -> bool:
        """True if pictures are not encoded yet."""
        return self.state.pictures is not None and self.state.pictures.num_waiting > 0

    def forget_prepared(self) -> None:
        """Forgets all that was prepared: its stream has ended."""
        self.state.grammars.drop_all()
        if self.state.adapters is not None:
            self.state.adapters.drop_all()
        if self.state.pictures is not None:
            self.state.pictures.drop_all()

    def execute(self, step: StepInput, queue_us: int = 0) -> StepOutput:
        """Launches one step and waits for its answer."""
        launched = self.launch(step, queue_us)
        if isinstance(launched, StepOutput):
            return launched
        output = launched.result()
        launched.record(output)
        return output

    @abstractmethod
    def warm_up(self) -> None:
        """Runs the kinds of step that serving brings; touches no state."""

    @abstractmethod
    def profile(self) -> None:
        """Takes the memory that serving takes, so that it can be measured."""

    @abstractmethod
    def _launch(self, staged: Staged, queue_us: int, started: float) -> StepOutput | Pending:
        """Writes a staged step's deltas and computes it, or starts to."""

    def _accept(self, rows: Rows, drawn: Drawn) -> Drawn:
        """Verifies a step's drafts: the tokens that count, which are also written to their rows."""
        assert rows.drafts is not None
        if self.draft_model is not None:
            self.draft_model.read(rows.drafts)
        kept = drawn.select(rows.drafts.verify(rows.samples, drawn.tokens))
        if (states := self._model.states) is not None:
            states.settle(rows.drafts.num_refused)
        # A row without a token ends, but whatever its place holds may still be read as one.
        self.state.write_known(rows, np.maximum(kept.tokens, 0), rows.num_sampled)
        if self.draft_model is not None:
            self.draft_model.settle(rows.drafts)
        return kept

    def _undo(self) -> None:
        """Leaves no trace of a step whose launch failed part of the way."""
        self.state.rollback()
        if (states := self._model.states) is not None:
            states.rollback()
        if self.draft_model is not None:
            self.draft_model.forget()

    def end_if_lost(self, error: Exception) -> None:
        """Ends the process if the device that raised an error will do nothing else any more."""
        end_if_lost(self._device, error)

    def _new_clock(self) -> StepClock:
        """For a step that computes something."""
        self._clock_before = clock = StepClock(self._device, self._clock_before)
        return clock

    def _move_blocks(self, staged: Staged) -> None:
        """Before the rows compute. Not undone by a rollback: what a failed step moved is void."""
        if staged.step.moves is not None:
            self._mover.apply(staged.step.moves)
        if self.draft_model is not None:
            self.draft_model.apply(staged.step)

    def _draft(self, staged: Staged, clock: StepClock, started: float) -> int | None:
        """Has the draft model make the step's drafts; returns the microseconds before, if it does.

        What it computes counts as a part of the forward pass.
        """
        drafts = staged.rows.drafts
        if self.draft_model is None or drafts is None or not drafts.are_made_here:
            return None
        prepare_us = us_since(started)
        clock.begin()
        self.draft_model.draft(self.state, staged, drafts)
        return prepare_us

    def _compute_prompt_outputs(
        self, parts: list[Part], hidden: torch.Tensor
    ) -> list[DevicePromptOutput]:
        """Answers about parts of prompts, from a step's hidden states [T, hidden]."""
        vocab_size = self.limits.vocab_size
        return compute_prompt_outputs(
            parts, hidden, self.state.token_rows, self._model.logits, vocab_size
        )

    def _forward(self, model_inputs: ModelInputs, last: LastTokens | None = None) -> torch.Tensor:
        return self._model.forward(
            model_inputs.token_ids,
            model_inputs.positions,
            self.kv_cache,
            model_inputs.attention,
            last,
        )

    def record(self, staged: Staged, output: StepOutput, started: float) -> None:
        """Notes a finished step for those who ask about them."""
        rows, occupants = staged.rows, staged.table.occupants
        if len(rows.slots) and rows.is_decode and not staged.step.reset and not output.error:
            self.decode_time = self.decode_time.plus(output.timings)
        request_ids = tuple(
            occupant.request_id
            for slot in rows.slots.tolist()
            if (occupant := occupants[slot]) is not None
        )
        is_decode_row = rows.samples & (rows.num_scheduled == 1)
        num_decode_rows, duration_us = int(np.count_nonzero(is_decode_row)), us_since(started)
        if output.error:
            self.counts.failed()
        else:
            kind = kind_of(len(rows.slots), num_decode_rows)
            num_tokens = int(rows.num_scheduled.sum())
            self.counts.computed(kind, num_tokens, duration_us, output.timings)
            if self.stays is not None:
                step_rows = StepRows(rows.slots, rows.num_scheduled, rows.samples, output.timings)
                self.stays.stepped(staged.step, step_rows, started)
            if (recording := self.recording) is not None and num_tokens:
                computed = ComputedRows(num_tokens, num_decode_rows)
                recording.computed(staged.step.step_id, computed, output.timings, started)
        self.records.append(
            ComputedStep(
                step_id=staged.step.step_id,
                request_ids=request_ids,
                slots=rows.slots,
                num_computed=rows.num_computed,
                num_scheduled=rows.num_scheduled,
                num_decode_rows=num_decode_rows,
                duration_us=duration_us,
                timings=output.timings,
                error=output.error,
            )
        )


def failed(step_id: int, error: str) -> StepOutput:
    """The answer to a step that left no trace."""
    return StepOutput(step_id, np.zeros(0, dtype=np.int32), error=error)


def to_output(step_id: int, rows: Rows, drawn: Drawn, timings: StepTimings) -> StepOutput:
    """The answer to a step; with drafts once these are verified."""
    output = _without_counts(step_id, drawn, timings)
    if rows.drafts is None:
        return output
    return replace(output, num_sampled=rows.num_sampled[rows.samples])


def _without_counts(step_id: int, drawn: Drawn, timings: StepTimings) -> StepOutput:
    tokens, logprobs, problems = drawn.tokens, drawn.logprobs, drawn.problems
    bad = tokens < 0
    if not bad.any():
        return StepOutput(step_id, tokens, timings=timings, logprobs=logprobs)
    no_choice = tokens == NO_CHOICE
    status = np.where(bad, ROW_NOT_FINITE, ROW_OK).astype(np.uint8)
    status[no_choice] = ROW_DEAD_END
    rows = np.flatnonzero(no_choice).tolist()
    errors = {row: problems.get(row, NO_TOKEN_LEFT) for row in rows}
    token_ids = np.where(bad, 0, tokens)
    output = StepOutput(step_id, token_ids, status, timings=timings, logprobs=logprobs)
    return replace(output, row_errors=errors)


def us_since(started: float) -> int:
    """Microseconds since a reading of the performance counter."""
    return int((time.perf_counter() - started) * 1e6)
