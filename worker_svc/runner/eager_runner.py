"""The runner that computes each step to its end: on the CPU, and on CUDA what has no fused layers.

A step's device work is waited for before `launch` returns, so every launch is an answer.
"""

import time
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from wire.logprobs import LogprobColumns
from worker_svc.device.step_clock import StepClock
from worker_svc.protocol.step import StepOutput, StepTimings
from worker_svc.runner import inputs
from worker_svc.runner.adapter_rows import rows_of
from worker_svc.runner.batch_state import Staged
from worker_svc.runner.model_runner import (
    NO_CHOICE,
    NOT_FINITE,
    Drawn,
    ModelRunner,
    to_output,
    us_since,
)
from worker_svc.runner.picture_rows import with_pictures
from worker_svc.runner.refusals import with_refusals
from worker_svc.runner.rows import Rows
from worker_svc.sampling.sampler import Sampled, SamplingRows, sample, sample_part


class EagerRunner(ModelRunner):
    """Launches nothing ahead: the torch layers, or the compiled ones of the CPU."""

    is_asynchronous = False

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
            began_s = time.perf_counter()
            model_inputs = inputs.build_idle(limits, lengths, self._device)
            hidden = self._forward(model_inputs)
            logits = self._model.logits(hidden[: len(lengths)])
            if self.draft_model is not None:
                self.draft_model.forward(model_inputs)
            for temperature in (0.0, 1.0):
                sample(logits, SamplingRows.alike(len(lengths), temperature, top_p=0.9))
            self.rehearsed_s[sum(lengths)] = time.perf_counter() - began_s

    def profile(self) -> None:
        """Takes the memory that serving takes, so that it can be measured."""
        self.warm_up()

    def _launch(self, staged: Staged, queue_us: int, started: float) -> StepOutput:
        output = with_refusals(staged, self._compute(staged, queue_us, started))
        if not staged.step.wants_state:
            return output
        return replace(output, state=self.state.state_hashes(staged))

    def _compute(self, staged: Staged, queue_us: int, started: float) -> StepOutput:
        self.state.write(staged)
        self._move_blocks(staged)
        rows, step_id = staged.rows, staged.step.step_id
        if not len(rows.slots):
            timings = StepTimings(queue_us=queue_us, prepare_us=us_since(started))
            return StepOutput(step_id, np.zeros(0, dtype=np.int32), timings=timings)
        clock = self._new_clock()
        prepare_us = self._draft(staged, clock, started)
        model_inputs = inputs.build(self.state, rows, staged.state_saves)
        if (pictures := self.state.pictures) is not None:
            model_inputs = with_pictures(
                model_inputs, staged, sees_both_ways=pictures.encoder.sees_both_ways
            )
        sampling = self.state.sampling_rows(staged)
        if prepare_us is None:
            prepare_us = us_since(started)
        if (adapters := self.state.adapters) is not None:
            adapters.step.rows = rows_of(staged.table, rows, self._device)
        clock.begin()
        hidden = self._forward(model_inputs)  # [T, hidden]
        clock.mark()
        parts = self.state.prompt_parts(staged)
        prompt_outputs = tuple(
            found.to_host() for found in self._compute_prompt_outputs(parts, hidden)
        )
        if model_inputs.logit_rows is not None:
            hidden = hidden.index_select(0, model_inputs.logit_rows)  # [R, hidden]
        tokens, logprobs = self._sample(hidden, sampling, rows, clock)
        drawn = Drawn(tokens, logprobs, sampling.logits_processors.problems())
        if rows.drafts is not None:
            drawn = self._accept(rows, drawn)
        clock.wait()  # the copy is done, but its mark comes after it
        forward_us, sample_us, copy_us = clock.spans_us()
        timings = StepTimings(queue_us, prepare_us, forward_us, sample_us, copy_us, clock.idle_us())
        output = to_output(step_id, rows, drawn, timings)
        return replace(output, prompt_outputs=prompt_outputs) if prompt_outputs else output

    def _sample(
        self, hidden: torch.Tensor, sampling: SamplingRows, rows: Rows, clock: StepClock
    ) -> tuple[NDArray[np.int32], LogprobColumns | None]:
        if not len(sampling):
            clock.mark()
            clock.mark()
            return np.zeros(0, dtype=np.int32), None
        sampled = sample_part(self._model.vocab_part(hidden), sampling)
        if rows.drafts is None:
            self.state.write_sampled(rows, sampled.token_ids)
        clock.mark()
        tokens = _to_host(sampled)
        logprobs = None if sampled.logprobs is None else sampled.logprobs.to_host()
        clock.mark()
        return tokens, logprobs


def _to_host(sampled: Sampled) -> NDArray[np.int32]:
    """One transfer: what is wrong with a row travels in place of its token."""
    packed = sampled.token_ids.int()
    if sampled.has_choice is not None:
        packed.masked_fill_(~sampled.has_choice, NO_CHOICE)
    tokens: NDArray[np.int32] = packed.masked_fill_(~sampled.finite, NOT_FINITE).cpu().numpy()
    return tokens
