"""The runner on CUDA: launches steps and leaves waiting for them to others.

A decode step is one graph replay, a step with prompts two, and what rows ask for in addition to
tokens a few more. Kernel by kernel are launched the rarest requests, and steps that are larger than
every graph. Nothing waits for the device: the host advances its table when the launch
has worked, and the tokens are read once the step's last event has come. The exception are steps
with drafts: only their answer says how far their rows get, so their launch waits for it.
"""

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from worker_svc.attention.kv_cache import PagedCache
from worker_svc.device.step_clock import StepClock
from worker_svc.device.transfer import upload_array
from worker_svc.models.step_model import StepModel
from worker_svc.protocol.step import (
    Limits,
    StepTimings,
)
from worker_svc.runner import asked, inputs
from worker_svc.runner.adapter_rows import bring_adapters, has_adapters
from worker_svc.runner.batch_state import Staged
from worker_svc.runner.device_sampling import SampleExtras, sample_rows
from worker_svc.runner.device_slots import SlotsOnDevice
from worker_svc.runner.graphs.adapter_batches import with_adapters
from worker_svc.runner.graphs.asked_graphs import AskedGraphs
from worker_svc.runner.graphs.decode_graphs import DecodeGraphs
from worker_svc.runner.graphs.step_graphs import StepGraphs
from worker_svc.runner.graphs.step_map import StepMap
from worker_svc.runner.in_flight import Computed, InFlight, RingTokens
from worker_svc.runner.inputs import ModelInputs
from worker_svc.runner.model_runner import ModelRunner, us_since
from worker_svc.runner.rows import Rows
from worker_svc.sampling.grammars import Grammars
from worker_svc.sampling.prompt_outputs import Part

log = logging.getLogger(__name__)

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ComputePlan:
    """The way in which a step is computed; without a map by a decode graph or kernel by kernel."""

    is_plain: bool = True  # no row that samples asks for more than a token
    step_map: StepMap | None = None
    brings_new: bool = False  # the map has the new sequences, too
    adapts: bool = False  # a row has an adapter


class CudaRunner(ModelRunner):
    """A loaded model with its cache, its slots and, once warm, its graphs."""

    is_asynchronous = True

    def __init__(
        self,
        model: StepModel,
        kv_cache: PagedCache,
        limits: Limits,
        device: torch.device,
        grammars: Grammars | None = None,
    ) -> None:
        super().__init__(model, kv_cache, limits, device, grammars)
        assert model.stack is not None  # what graphs cannot record goes to an EagerRunner
        self.slots = SlotsOnDevice(self.state)
        self.state.grammars.fill_for(device, limits.max_num_seqs)
        self._decode_graphs = DecodeGraphs(model, kv_cache, self.slots, limits)
        # Without them steps with prompts are computed kernel by kernel.
        self._step_graphs: StepGraphs | None = None
        self._asked_graphs: AskedGraphs | None = None
        if model.stack.splits:
            self._step_graphs = StepGraphs(model, kv_cache, self.slots, limits)
            self._asked_graphs = AskedGraphs(self._step_graphs, self.slots, limits)
        self.graph_bytes = 0  # of the device's memory; known once warm

    @property
    def graph_batch_sizes(self) -> tuple[int, ...]:
        return self._decode_graphs.sizes

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Runs the largest prefill and captures every decode step; touches no state."""
        self.state.grammars.prepare()
        self._rehearse_prefills(self._prefill_lengths())
        self.slots.rehearse()
        free = torch.cuda.mem_get_info(self._device)[0]
        self._capture()
        self.graph_bytes = free - torch.cuda.mem_get_info(self._device)[0]
        log.info("graphs take %.2f GiB", self.graph_bytes / GIB)
        self.slots.restore(self.state.table)
        torch.cuda.synchronize(self._device)
        # All this lives as long as the process: searching it for garbage would hold up a step.
        gc.collect()
        gc.freeze()

    @torch.inference_mode()
    def profile(self) -> None:
        """Takes the memory that serving takes: the largest steps, and graphs for the largest."""
        self._rehearse_prefills(self._largest_prefills())
        self._capture(largest_only=True)
        torch.cuda.synchronize(self._device)

    def _capture(self, largest_only: bool = False) -> None:
        pool = torch.cuda.graph_pool_handle()
        for graphs in (self._step_graphs, self._asked_graphs):
            if graphs is not None:
                graphs.capture(pool, largest_only)
        self._decode_graphs.capture(pool, largest_only)
        if self.draft_model is not None:
            self.draft_model.capture(pool, largest_only)

    def rehearsals(self) -> tuple[list[Callable[[], None]], list[Callable[[], None]]]:
        """Every kind of prefill, then of decode step, as calls that compute nothing for anybody."""
        prefills: list[Callable[[], None]] = [
            partial(self._rehearse, lengths) for lengths in self._prefill_lengths()
        ]
        for graphs in (self._step_graphs, self._asked_graphs):
            if graphs is not None:
                prefills += graphs.rehearsals()
        prefills.append(self.slots.rehearse)
        return prefills, self._decode_graphs.rehearsals()

    def _largest_prefills(self) -> list[list[int]]:
        """Whole prompts, and as many short ones as there may be, whose logits are the largest."""
        limits, most = self.limits, self.limits.max_step_tokens
        full, rest = divmod(most, limits.max_model_len)
        return [
            [limits.max_model_len] * full + [rest] * (rest > 0),
            [2] * max(1, min(limits.max_num_seqs, most // 2)),
        ]

    def _prefill_lengths(self) -> list[list[int]]:
        """The largest, and one chunk of each size for which kernels are compiled."""
        longest_chunk = min(self.limits.max_step_tokens, self.limits.max_model_len, 256)
        chunks = [[2**n] for n in range(1, longest_chunk.bit_length())]
        return [*self._largest_prefills(), *chunks]

    def _rehearse_prefills(self, prefills: list[list[int]]) -> None:
        for lengths in prefills:
            self._rehearse(lengths)
        self.slots.restore(self.state.table)

    def _rehearse(self, lengths: list[int]) -> None:
        idle = inputs.build_idle(self.limits, lengths, self._device)
        hidden = self._forward(idle)[: len(lengths)]
        if (layers := self._model.adapted) is not None:
            slots = torch.full((sum(lengths),), -1, dtype=torch.int32, device=self._device)
            batch = with_adapters(idle.attention, layers, self.slots, slots, len(slots))
            self._forward(replace(idle, attention=batch))
        if self.draft_model is not None:
            self.draft_model.forward(idle)
        no_slots = torch.full((len(lengths),), -1, dtype=torch.int32, device=self._device)
        for filters in (False, True):
            self.slots.sample(self._model.vocab_part(hidden), no_slots, filters)

    def _launch(self, staged: Staged, queue_us: int, started: float) -> InFlight:
        rows = staged.rows
        if (adapters := self.state.adapters) is not None and adapters.device is not None:
            bring_adapters(adapters.device, self.state.table, staged)
        parts = self.state.prompt_parts(staged)
        plan = self._plan(staged, parts)
        self.state.write(staged, _no_entering if plan.brings_new else self.slots.enter)
        self._move_blocks(staged)
        clock = self._new_clock() if len(rows.slots) else StepClock(self._device)
        drafted_us = self._draft(staged, clock, started)
        computed = self._compute(staged, plan, parts, clock, started)
        if rows.drafts is not None:
            computed = self._verified(staged, computed, clock)
        snapshot = None
        if staged.step.wants_state:
            snapshot = self.slots.look(staged)
            clock.mark()  # the step is done when this copy is
        sampled = None
        if rows.samples.any() and rows.drafts is None:
            sampled = RingTokens(self.slots, self.slots.count(), rows, computed.places, clock)
        self.state.sampled_last = sampled
        return InFlight(
            runner=self,
            staged=staged,
            clock=clock,
            sampled=sampled,
            computed=computed,
            timings=StepTimings(
                queue_us, prepare_us=drafted_us or computed.prepare_us or us_since(started)
            ),
            started=started,
            snapshot=snapshot,
        )

    def _verified(self, staged: Staged, computed: Computed, clock: StepClock) -> Computed:
        """Waits for a step with drafts, since how far its rows got decides what the tables say."""
        clock.wait()
        token_ids = computed.extras.token_ids
        assert token_ids is not None
        accepted = self._accept(staged.rows, computed.extras.drawn(token_ids.numpy().copy()))
        self.slots.advance(staged.rows)
        return replace(computed, accepted=accepted)

    def _plan(self, staged: Staged, parts: list[Part]) -> "ComputePlan":
        """The way in which the rows are computed, known before anything is written."""
        rows, step = staged.rows, staged.step
        if not len(rows.slots):
            return ComputePlan()
        is_plain = self._is_plain(staged)
        adapts = self._model.adapted is not None and has_adapters(staged.table, rows)
        plan = ComputePlan(is_plain, adapts=adapts)
        if parts or (rows.is_decode and is_plain) or self._step_graphs is None:
            return plan
        # Graphs know neither where a snapshot cuts a prompt nor how states go back over drafts.
        has_states = self._model.states is not None
        if has_states and (staged.state_saves.within or rows.drafts is not None):
            return plan
        step_map = self._step_graphs.map(rows)
        # Appended blocks are written ahead of the graph, so their sequence must be there by then.
        new = {sequence.slot for sequence in step.new_sequences}
        if step_map is None or not new or step.appends_to(new):
            return replace(plan, step_map=step_map)
        entering = step_map.with_entering(self.slots.entering(staged), len(new))
        return replace(plan, step_map=entering or step_map, brings_new=entering is not None)

    def _compute(
        self,
        staged: Staged,
        plan: "ComputePlan",
        parts: list[Part],
        clock: StepClock,
        started: float,
    ) -> Computed:
        """Launches what the rows need, in the graphs that hold them."""
        rows = staged.rows
        if not len(rows.slots):
            return Computed()
        if plan.step_map is not None:
            return self._compute_mapped(staged, plan, plan.step_map, clock, started)
        if parts or not (rows.is_decode and plan.is_plain):
            return self._compute_eagerly(staged, plan, parts, clock, started)
        prepare_us = us_since(started)
        clock.begin()
        filters = asked.may_filter(staged.table.columns, rows.slots)
        places = self._decode_graphs.replay(
            rows.slots, rows.num_computed, filters, adapts=plan.adapts
        )
        clock.mark()
        return Computed(prepare_us, places)

    def _compute_mapped(
        self,
        staged: Staged,
        plan: "ComputePlan",
        step_map: StepMap,
        clock: StepClock,
        started: float,
    ) -> Computed:
        """By the graphs of steps; what rows ask for in addition is launched after the first."""
        rows, sampling, is_plain = staged.rows, None, plan.is_plain
        graphs, asked_graphs = self._step_graphs, self._asked_graphs
        assert graphs is not None and asked_graphs is not None  # the map is theirs
        # Before the model is launched, so that masks are filled while it computes.
        is_early = staged.table.columns["has_grammar"][rows.slots].any()
        if is_early and not is_plain:
            sampling = self.state.sampling_rows(staged)
        prepare_us = us_since(started)
        clock.begin()
        graphs.begin(step_map, adapts=plan.adapts)
        clock.mark()
        if not step_map.num_sampled:
            clock.mark()
            return Computed(prepare_us)
        if is_plain:
            filters = asked.may_filter(staged.table.columns, rows.slots)
            graphs.sample(step_map, filters, adapts=plan.adapts)
            clock.mark()
            return Computed(prepare_us, step_map.places)
        if sampling is None:
            sampling = self.state.sampling_rows(staged)
        placed = graphs.logits(step_map, adapts=plan.adapts)
        if rows.drafts is None and asked_graphs.hold(step_map, sampling):
            filters = bool(sampling.is_filtered.any())
            extras = asked_graphs.sample(step_map, staged, sampling, filters)
            clock.mark()
            return Computed(prepare_us, step_map.places, extras)
        given = placed if rows.drafts is None else placed.ordered()
        extras = sample_rows(self.slots, given, staged, sampling)
        clock.mark()
        return Computed(prepare_us, step_map.places, extras)

    def _compute_eagerly(
        self,
        staged: Staged,
        plan: "ComputePlan",
        parts: list[Part],
        clock: StepClock,
        started: float,
    ) -> Computed:
        """Kernel by kernel: steps that no graph holds, and those that say something of prompts."""
        model_inputs = inputs.build(self.state, staged.rows, staged.state_saves)
        if plan.adapts:
            model_inputs = self._with_adapters(model_inputs, staged.rows)
        sampling = self.state.sampling_rows(staged) if staged.rows.samples.any() else None
        prepare_us = us_since(started)
        clock.begin()
        # Who asks about a prompt wants the hidden states of all its tokens.
        last = None if parts else model_inputs.last
        hidden = self._forward(model_inputs, last)  # [T, hidden], or of the last tokens
        clock.mark()
        device_prompt_outputs, extras = self._compute_prompt_outputs(parts, hidden), SampleExtras()
        if sampling is not None:
            if last is None and model_inputs.logit_rows is not None:
                hidden = hidden.index_select(0, model_inputs.logit_rows)  # [R, hidden]
            extras = sample_rows(self.slots, self._model.vocab_part(hidden), staged, sampling)
        clock.mark()
        return Computed(
            prepare_us, extras=extras, device_prompt_outputs=tuple(device_prompt_outputs)
        )

    def _with_adapters(self, model_inputs: ModelInputs, rows: Rows) -> ModelInputs:
        """The inputs of a step launched kernel by kernel, with the adapters of its tokens."""
        layers, last = self._model.adapted, model_inputs.last
        assert layers is not None  # a row has an adapter
        slots = np.repeat(rows.slots, rows.num_scheduled).astype(np.int32)
        there = upload_array(self._device, slots)
        attention = with_adapters(model_inputs.attention, layers, self.slots, there, len(slots))
        if last is not None:
            of_last = there.index_select(0, last.rows)
            batch = with_adapters(last.attention, layers, self.slots, of_last, len(last.rows))
            last = replace(last, attention=batch)
        return replace(model_inputs, attention=attention, last=last)

    def _is_plain(self, staged: Staged) -> bool:
        """True if rows sample one token each and want no logits changed or reported."""
        if staged.rows.drafts is not None:
            return False
        rows = staged.rows
        return asked.are_plain(staged.table.columns, rows.slots[rows.samples])

    def _undo(self) -> None:
        super()._undo()
        try:
            self.slots.restore(self.state.table)
        except RuntimeError:
            log.exception("the device does not answer")
        self._decode_graphs.forget()


def _no_entering(staged: Staged) -> None:
    """The step's graph lets them enter."""
