"""Runs steps: deltas to state, state to model inputs, logits to tokens.

Decides nothing and knows no protocol. A step either works or leaves no trace.
"""

import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from rpc.logprobs import LogprobColumns
from worker_svc import inputs
from worker_svc.batch_state import BatchState, Rows, Staged
from worker_svc.block_mover import BlockMover
from worker_svc.device import end_if_lost
from worker_svc.grammars import Grammars
from worker_svc.inputs import LastTokens, ModelInputs
from worker_svc.kv_cache import KVCache
from worker_svc.models import Decoder
from worker_svc.prompt_reports import Found, Part, find_out
from worker_svc.sampler import Sampled, SamplingRows, sample, sample_part
from worker_svc.step import (
    ROW_DEAD_END,
    ROW_NOT_FINITE,
    ROW_OK,
    Limits,
    StepInput,
    StepOutput,
    StepRecord,
    StepTimings,
)
from worker_svc.step_clock import DecodeTime, StepClock

MAX_RECORDS = 256

# What travels from the device in place of a token, below every token id.
NOT_FINITE, NO_CHOICE = -1, -2
NO_PROBLEMS: Mapping[int, str] = MappingProxyType({})
NO_TOKEN_LEFT = (
    "no token is left to go on with: together, the request's grammar, min_tokens, "
    "allowed_token_ids, bad_words and logit_bias forbid every one"
)

log = logging.getLogger(__name__)


class Pending(Protocol):
    """A step that has been started."""

    def result(self) -> StepOutput:
        """Waits for it, in any thread."""

    def record(self, output: StepOutput) -> None:
        """Notes it for the debug service; to be called once, behind the answer."""


class ModelRunner:
    """A loaded model with its cache and its slots; complete once built."""

    is_asynchronous = False

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCache,
        limits: Limits,
        device: torch.device,
        grammars: Grammars | None = None,
    ) -> None:
        self.limits = limits
        self.state = BatchState(limits, device, grammars or Grammars(limits.vocab_size))
        self.records: deque[StepRecord] = deque(maxlen=MAX_RECORDS)  # newest last
        self.decode_time = DecodeTime()
        self._clock_before: StepClock | None = None  # of the last step that computed
        self._model = model
        self._kv_cache = kv_cache
        self._device = device
        self._mover = BlockMover(kv_cache, limits.num_host_blocks, device)

    @property
    def graph_batch_sizes(self) -> tuple[int, ...]:
        """Batch sizes with a captured graph."""
        return ()

    @torch.inference_mode()
    def execute(self, step: StepInput, queue_us: int = 0) -> StepOutput:
        """Computes one step. Raises BadStep, or answers with an error, without a trace of it."""
        started = time.perf_counter()
        staged = self.state.stage(step)
        try:
            output = self._compute(staged, queue_us, started)
        except Exception as error:  # whatever the device raises, the process and the state live on
            log.exception("step %d failed", step.step_id)
            self.state.rollback()
            self.end_if_lost(error)
            self._model.group.confirm_failure()
            if isinstance(error, torch.cuda.OutOfMemoryError):
                torch.cuda.empty_cache()
            output = failed(step.step_id, f"{type(error).__name__}: {error}")
        else:
            self.state.commit(staged)
            if step.wants_state:
                output = replace(output, state=self.state.state_hashes())
        self.record(staged, output, started)
        return output

    def launch(self, step: StepInput, queue_us: int = 0) -> "StepOutput | Pending":
        """Starts one step; here it is finished when this returns."""
        return self.execute(step, queue_us)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Runs the largest prefill, the smallest and the largest decode; touches no state."""
        self.state.grammars.prepare()
        limits = self.limits
        full, rest = divmod(limits.max_step_tokens, limits.max_model_len)
        for lengths in (
            [limits.max_model_len] * full + [rest] * (rest > 0),
            [1],
            [1] * limits.max_decode_rows,
        ):
            model_inputs = inputs.build_idle(limits, lengths, self._device)
            hidden = self._forward(model_inputs)
            logits = self._model.logits(hidden[: len(lengths)])
            for temperature in (0.0, 1.0):
                sample(logits, SamplingRows.alike(len(lengths), temperature, top_p=0.9))

    def profile(self) -> None:
        """Takes the memory that serving takes, so that it can be measured."""
        self.warm_up()

    def end_if_lost(self, error: Exception) -> None:
        """Ends the process if the device that raised an error will do nothing else any more."""
        end_if_lost(self._device, error)

    def _compute(self, staged: Staged, queue_us: int, started: float) -> StepOutput:
        self.state.write(staged)
        self._move_blocks(staged)
        rows, step_id = staged.rows, staged.step.step_id
        if not len(rows.slots):
            timings = StepTimings(queue_us=queue_us, prepare_us=us_since(started))
            return StepOutput(step_id, np.zeros(0, dtype=np.int32), timings=timings)
        model_inputs = inputs.build(self.state, rows)
        sampling = self.state.sampling_rows(staged)
        prepare_us = us_since(started)
        clock = self._new_clock()
        clock.mark()
        hidden = self._forward(model_inputs)  # [T, hidden]
        clock.mark()
        parts = self.state.prompt_parts(staged)
        reports = tuple(found.to_host() for found in self._find_out(parts, hidden))
        if model_inputs.logit_rows is not None:
            hidden = hidden.index_select(0, model_inputs.logit_rows)  # [R, hidden]
        tokens, logprobs = self._sample(hidden, sampling, rows, clock)
        forward_us, sample_us, copy_us = clock.spans_us()
        timings = StepTimings(queue_us, prepare_us, forward_us, sample_us, copy_us, clock.idle_us())
        problems = sampling.adjustments.problems()
        output = to_output(step_id, tokens, timings, logprobs, problems)
        return replace(output, prompt_reports=reports) if reports else output

    def _new_clock(self) -> StepClock:
        """For a step that computes something."""
        self._clock_before = clock = StepClock(self._device, self._clock_before)
        return clock

    def _move_blocks(self, staged: Staged) -> None:
        """Before the rows compute. Not undone by a rollback: what a failed step moved is void."""
        if staged.step.moves is not None:
            self._mover.apply(staged.step.moves)

    def _find_out(self, parts: list[Part], hidden: torch.Tensor) -> list[Found]:
        """What is asked about parts of prompts, from a step's hidden states [T, hidden]."""
        vocab_size = self.limits.vocab_size
        return find_out(parts, hidden, self.state.token_rows, self._model.logits, vocab_size)

    def _forward(self, model_inputs: ModelInputs, last: LastTokens | None = None) -> torch.Tensor:
        return self._model.forward(
            model_inputs.token_ids,
            model_inputs.positions,
            self._kv_cache,
            model_inputs.attention,
            last,
        )

    def _sample(
        self, hidden: torch.Tensor, sampling: SamplingRows, rows: Rows, clock: StepClock
    ) -> tuple[NDArray[np.int32], LogprobColumns | None]:
        if not len(sampling):
            clock.mark()
            clock.mark()
            return np.zeros(0, dtype=np.int32), None
        sampled = sample_part(self._model.vocab_part(hidden), sampling)
        self.state.write_sampled(rows, sampled.token_ids)
        clock.mark()
        tokens = _to_host(sampled)
        logprobs = None if sampled.logprobs is None else sampled.logprobs.to_host()
        clock.mark()
        return tokens, logprobs

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
        self.records.append(
            StepRecord(
                step_id=staged.step.step_id,
                request_ids=request_ids,
                slots=rows.slots,
                num_computed=rows.num_computed,
                num_scheduled=rows.num_scheduled,
                num_decode_rows=int(np.count_nonzero(is_decode_row)),
                duration_us=us_since(started),
                timings=output.timings,
                error=output.error,
            )
        )


def failed(step_id: int, error: str) -> StepOutput:
    """The answer to a step that left no trace."""
    return StepOutput(step_id, np.zeros(0, dtype=np.int32), error=error)


def to_output(
    step_id: int,
    tokens: NDArray[np.int32],
    timings: StepTimings,
    logprobs: LogprobColumns | None = None,
    problems: Mapping[int, str] = NO_PROBLEMS,
) -> StepOutput:
    """The answer to a step; `problems` says more about rows that have no choice."""
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


def _to_host(sampled: Sampled) -> NDArray[np.int32]:
    """One transfer: what is wrong with a row travels in place of its token."""
    packed = sampled.token_ids.int()
    if sampled.has_choice is not None:
        packed.masked_fill_(~sampled.has_choice, NO_CHOICE)
    tokens: NDArray[np.int32] = packed.masked_fill_(~sampled.finite, NOT_FINITE).cpu().numpy()
    return tokens


def us_since(started: float) -> int:
    """Microseconds since a reading of the performance counter."""
    return int((time.perf_counter() - started) * 1e6)
