"""A model of transformers' classes as the worker's runner sees it.

The class computes everything but attention over earlier tokens, which is the paged cache's, and
states between steps, which are the slots'. It is called with a step's tokens as one flat row; a
model with states is called once for all rows of one token, and once for each longer one.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from worker_svc.attention.batch import AttentionBatch, LastTokens
from worker_svc.attention.kv_plan import KvPlan, plan_of
from worker_svc.attention.layer_cache import LayerCache
from worker_svc.attention.page_cache import PageCache
from worker_svc.attention.pictures import StepPictures
from worker_svc.device.capture_stream import captured, capturing
from worker_svc.models.layer_stack import TileHeads
from worker_svc.models.spec import UnsupportedModel
from worker_svc.parallel.group import ALONE, Group
from worker_svc.parallel.vocab_part import VocabPart
from worker_svc.states.slots import SlotStates, row_bytes
from worker_svc.states.spans import StateSpan, spans
from worker_svc.transformers_models.attention import (
    NAME,
    Attender,
    KernelAttention,
    KvLayout,
    Probe,
    TorchAttender,
    UnservedAttention,
    attending,
    refused_if_it_fails,
)
from worker_svc.transformers_models.config import TransformersConfig
from worker_svc.transformers_models.division import Division
from worker_svc.transformers_models.pictures import PictureTower, inputs_with
from worker_svc.transformers_models.states import PassStates, StateProbe

log = logging.getLogger(__name__)

# Of the check at load: tokens, tokens per block, and the largest relative error of hidden states.
# For kernels a block as large as is usual, so that none is compiled for this alone.
_NUM_CHECKED, _CHECKED_BLOCK = 9, {"cpu": 4, "cuda": 16}
# A wrong position or mask makes one of about 1. Of 16-bit types rounding moves routers, too.
_MOST_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.5}


class _Output:
    """The output of layers that a head reads: hidden states, and None for whatever else it asks."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]


class _Given(nn.Module):
    """Stands where the layers were, so that a class computes its head from hidden states."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.config = getattr(base, "config", None)
        self.hidden = torch.empty(0)

    def __getattr__(self, name: str) -> Any:
        """Its own value, or itself: some heads call a part of the layers, as `model.decoder`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            return self

    def forward(self, *args: Any, **kwargs: Any) -> _Output:
        """The hidden states [1, T, hidden] that were given."""
        return _Output(self.hidden)


class TransformersModel:
    """The layers and the head of one model, its cache's layout and its states' shapes."""

    fused = None  # no layers of ours
    adapted = None

    def __init__(
        self,
        config: TransformersConfig,
        model: PreTrainedModel,
        dtype: torch.dtype,
        device: torch.device,
        division: Division | None = None,
        *,
        encodes_pictures: bool = False,
    ) -> None:
        """`division` says what of a model several ranks have; all of them make it together.

        With `encodes_pictures` steps may have pictures, and none is recorded in a graph.
        Raises UnsupportedModel for a class whose attention or states are not served.
        """
        self.config = config
        self.dtype = self.kv_dtype = dtype
        self.device = device
        self.group: Group = ALONE if division is None else division.group
        self._divided_head = division if division is not None and division.divides_head else None
        name, base, self._layers = _parts(model)
        self.tower: PictureTower | None = None
        if encodes_pictures:
            self.tower = PictureTower.of(base, config.whole, device, dtype)
        self._head, self._given = model, _Given(base)
        setattr(model, name, self._given)
        probe, states = Probe(), StateProbe()
        with refused_if_it_fails(type(model)):
            self._probe(probe, states)
        if not probe.kinds:
            raise UnsupportedModel(
                f"{type(model).__name__} does not pass its attention to other implementations"
            )
        self._layout = KvLayout(probe.kinds, probe.sources)
        self.state_shapes = states.shapes
        self.states: SlotStates | None = None  # made with the slots, for a model that has any
        self._kernels: KernelAttention | None = None
        if device.type == "cuda" and KernelAttention.serves(self._layout):
            self._kernels = KernelAttention(
                self._layout, torch.empty(0, dtype=dtype, device=device)
            )
        with refused_if_it_fails(type(model)):
            self._check_steps()
            self._check_head()
        self.stack = self._recordable()

    @torch.inference_mode()
    def _probe(self, probe: Probe, states: StateProbe) -> None:
        """Runs two tokens without a past through the layers, to see what they ask for."""
        two = torch.zeros((1, 2), dtype=torch.int64, device=self.device)
        with attending(probe):
            self._run(two, torch.arange(2, device=self.device).unsqueeze(0), states)

    @torch.inference_mode()
    def _check_steps(self) -> None:
        """Compares a few tokens, step by step over a cache, with one pass of the class alone.

        A class may compute its positions, or something of its attention, out of a cache of its own.
        Raises UnservedAttention.
        """
        token_ids = torch.arange(3, 3 + _NUM_CHECKED, device=self.device) % self.config.vocab_size
        positions = torch.arange(_NUM_CHECKED, device=self.device)
        config: Any = self._layers.config
        config._attn_implementation = "eager"
        try:
            whole = self._run(token_ids.unsqueeze(0), positions.unsqueeze(0), None)[0]
        finally:
            config._attn_implementation = NAME
        block_size = _CHECKED_BLOCK[self.device.type]
        cache = self.new_cache(2 + _NUM_CHECKED // block_size, block_size)
        self.make_states(1, 0)
        parts = []
        # Most of them after a first step, as chunks and alone.
        for begin, end in pairwise((0, 2, 5, *range(6, _NUM_CHECKED + 1))):
            batch = _one_sequence(begin, end, self.device)
            parts.append(self.forward(token_ids[begin:end], positions[begin:end], cache, batch))
            if self.states is not None:
                self.states.commit(np.zeros(1, dtype=np.int64))
        self.states = None
        errors = (torch.cat(parts).float() - whole.float()).norm(dim=-1)
        # A router may choose another expert by rounding, for some of the tokens.
        error = float((errors / whole.float().norm(dim=-1)).median())
        if not error < _MOST_ERROR[self.dtype]:
            raise UnservedAttention(
                f"step by step it gives other hidden states than in one pass, by {error:.1%}"
            )

    @torch.inference_mode()
    def _check_head(self) -> None:
        """Raises UnservedAttention for a head that computes a logit out of those of other tokens.

        Ranks have the logits of their parts of the vocabulary, and ask each other for no others.
        """
        if self._divided_head is None:
            return
        width = self.config.hf.hidden_size
        hidden = torch.linspace(-1, 1, width, device=self.device, dtype=self.dtype).unsqueeze(0)
        parts = self.vocab_part(hidden).whole()
        with self._divided_head.whole_logits(self._head):
            whole = self._logits(hidden)
        if parts.shape != whole.shape or not torch.equal(parts, whole):
            raise UnservedAttention("its logits cannot be computed by parts of the vocabulary")

    def _recordable(self) -> "TransformersStack | None":
        """The layers for graphs; None if they cannot be recorded."""
        if self._kernels is None or self.tower is not None:
            return None
        stack = TransformersStack(self, self._layout)
        return stack if self.group.smallest(partial(self._records, stack)) else None

    def _records(self, stack: "TransformersStack") -> int:
        """1 if a graph can record the layers, 0 if not: ranks record all, or none."""
        try:
            stack.try_recording(self.device)
        except Exception as error:  # what classes do is not known here
            log.warning("steps are computed without graphs: %s: %s", type(error).__name__, error)
            torch.cuda.synchronize(self.device)
            return 0
        return 1

    @property
    def attention_backend(self) -> str:
        """Name of the attention implementation."""
        return "torch" if self._kernels is None else "triton"

    @property
    def has_states(self) -> bool:
        """True if a token's result depends on more than keys and values of earlier ones."""
        return bool(self.state_shapes)

    def kv_layout(self, num_blocks: int, block_size: int) -> str:
        """The sizes of a cache of so many blocks, layers of one kind together."""
        counts: dict[str, int] = {}
        for shape in self._layout.shapes:
            words = f"{shape.num_kv_heads} x {shape.k_dim}"
            if shape.v_dim != shape.k_dim:
                words += f" + {shape.v_dim}"
            counts[words] = counts.get(words, 0) + 1
        kinds = ", ".join(f"{words} in {count} layers" for words, count in counts.items())
        return f"{num_blocks} blocks of {block_size} tokens: {kinds}"

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block over all layers."""
        width = sum(shape.width for shape in self._layout.shapes)
        return block_size * width * self.kv_dtype.itemsize

    def new_cache(self, num_blocks: int, block_size: int) -> LayerCache:
        """An empty KV cache for this model."""
        return LayerCache(self._layout.shapes, num_blocks, block_size, self.kv_dtype, self.device)

    def kv_plan(self, block_size: int, max_model_len: int) -> KvPlan | None:
        """The KV groups of layers with different windows; None: all layers have one table."""
        windows = self._layout.windows(max_model_len)
        # No class has both windows and states, so nothing shows that they go together.
        if not any(windows) or self.has_states:
            return None
        plan = plan_of(self._layout.shapes, windows, block_size, self.kv_dtype)
        if plan is None:
            log.warning("layers with windows keep all tokens: no size of pages suits all layers")
        return plan

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one sequence."""
        return row_bytes(self.state_shapes)

    @property
    def settles_states(self) -> bool:
        """False: a class computes states and all else in one pass."""
        return False

    def make_states(self, max_num_seqs: int, num_snapshots: int) -> None:
        """Allocates the states of all slots, and snapshots of them."""
        if self.has_states:
            self.states = SlotStates(self.state_shapes, max_num_seqs, self.device, num_snapshots)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: LayerCache | PageCache,
        batch: AttentionBatch,
        last: LastTokens | None = None,
    ) -> Tensor:
        """Token ids and positions [T] of a step -> hidden states [T, hidden], normed."""
        if self.states is None:
            with attending(self._attender(kv_cache, batch)):
                ids, where = token_ids.unsqueeze(0), positions.unsqueeze(0)
                hidden = self._run(ids, where, None, batch.pictures)[0]
        else:
            hidden = self._in_passes(token_ids, positions, kv_cache, batch, self.states)
        return hidden if last is None else hidden.index_select(0, last.rows)

    def _attender(self, kv_cache: LayerCache | PageCache, batch: AttentionBatch) -> Attender:
        sees_both_ways = batch.pictures is not None and batch.pictures.ranges
        if self._kernels is not None and not sees_both_ways:
            return self._kernels.of_step(kv_cache, batch)
        return TorchAttender(self._layout, kv_cache, batch)

    def _in_passes(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: LayerCache | PageCache,
        batch: AttentionBatch,
        states: SlotStates,
    ) -> Tensor:
        """Hidden states [T, hidden] of a model whose sequences have states."""
        out, carried = None, None
        for part in _passes(batch):
            hidden, passed = self._pass(token_ids, positions, kv_cache, part, states, carried)
            carried = passed if part.is_cut else None
            if out is None:
                out = hidden.new_empty((len(token_ids), hidden.shape[-1]))
            out[part.tokens] = hidden
        assert out is not None  # a step has tokens
        return out

    def _pass(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: LayerCache | PageCache,
        part: "_Pass",
        slot_states: SlotStates,
        carried: PassStates | None,
    ) -> tuple[Tensor, PassStates]:
        """Hidden states [N, hidden] of the tokens of some sequences, and their states after it.

        `carried` are the states after the pass before, if that was cut off in this sequence.
        """
        ids, where = (x[part.tokens].view(part.num_sequences, -1) for x in (token_ids, positions))
        slots = part.batch.slots
        if slots is None:  # a rehearsal: no sequence's states
            slots = torch.zeros(part.num_sequences, dtype=torch.int64, device=self.device)
        passed = carried
        if passed is None:
            passed = PassStates(slot_states.read(slots, where[:, 0] == 0))
        with attending(self._attender(kv_cache, part.batch)):
            hidden = self._run(ids, where, passed, part.batch.pictures).flatten(0, 1)
        if part.snapshot is not None:
            slot_states.keep(part.snapshot, passed.states)
        elif part.batch.slots is not None:
            slot_states.write(slots, passed.states)
        return hidden, passed

    def _run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        states: StateProbe | None,
        pictures: StepPictures | None = None,
    ) -> Tensor:
        """Token ids and positions [B, N] -> hidden states [B, N, hidden]."""
        output = self._layers(
            attention_mask=None,
            past_key_values=states,
            use_cache=states is not None,
            **inputs_with(self._layers, token_ids, positions, pictures),
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    @torch.inference_mode()
    def vocab_part(self, hidden: Tensor) -> VocabPart:
        """Hidden states [R, hidden] -> logits of this rank's part of the vocabulary, or of all."""
        logits = self._logits(hidden)
        if self._divided_head is None:
            return VocabPart(logits)
        return VocabPart(logits, self.group.rank * logits.shape[-1], self.group)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [R, hidden] -> what the class's head computes of them on this rank."""
        self._given.hidden = hidden.unsqueeze(0)
        # The ids are not read; classes want some.
        ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=self.device)
        logits: Tensor = self._head(input_ids=ids, use_cache=False).logits[0]
        return logits

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [R, hidden] -> float32 [R, vocab]."""
        return self.vocab_part(hidden).whole().float()


def _one_sequence(begin: int, end: int, device: torch.device) -> AttentionBatch:
    """The tokens from `begin` on of a sequence in the first slot and the first blocks."""
    size, num_tokens = _CHECKED_BLOCK[device.type], end - begin
    return AttentionBatch(
        slot_mapping=size + torch.arange(begin, end, device=device),
        block_tables=torch.arange(
            1, 2 + _NUM_CHECKED // size, dtype=torch.int32, device=device
        ).unsqueeze(0),
        context_lens=torch.tensor([end], dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        max_seqlen_q=num_tokens,
        max_context_len=end,
        slots=torch.zeros(1, dtype=torch.int64, device=device),
    )


def _parts(model: PreTrainedModel) -> tuple[str, nn.Module, nn.Module]:
    """The name of the part next to the head, that part, and the layers, which are in it or it."""
    layers: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    for name, part in model.named_children():
        if any(module is layers for module in part.modules()):
            return name, part, layers
    own = getattr(model, "model", None)
    if isinstance(own, nn.Module):
        return "model", own, own
    raise UnsupportedModel(f"{type(model).__name__} does not say where its layers are")


class TransformersStack:
    """The layers of a model as graphs record them.

    A class computes its layers in one call: `begin` does all, and `finish` nothing.
    """

    def __init__(self, model: TransformersModel, layout: KvLayout) -> None:
        """`layout` has one kind of heads."""
        self._model = model
        kind = next(iter(layout.kinds.values()))
        self.tile_heads = TileHeads(kind.num_heads, kind.kv.num_kv_heads, kind.kv.k_dim)
        self.carried_widths = (model.config.hf.hidden_size, 1)  # hidden states, and nothing
        # Sequences with states are computed apart from each other where they have several tokens.
        self.splits = not model.has_states

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: LayerCache | PageCache,
        batch: AttentionBatch,
        last: LastTokens | None = None,
    ) -> Tensor:
        """See `LayerStack`."""
        return self._model.forward(token_ids, positions, kv_cache, batch, last)

    def begin(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: LayerCache | PageCache,
        batch: AttentionBatch,
    ) -> tuple[Tensor, Tensor]:
        """See `LayerStack`: all of it."""
        hidden = self._model.forward(token_ids, positions, kv_cache, batch)
        return hidden, hidden.new_empty((len(hidden), 1))

    def finish(
        self,
        carried: tuple[Tensor, Tensor],
        kv_cache: LayerCache | PageCache,
        batch: AttentionBatch,
    ) -> Tensor:
        """See `LayerStack`: nothing is left to do."""
        return carried[0]

    def rehearsed(self) -> "TransformersStack":
        """The same: a class has no fewer layers for a while."""
        return self

    @torch.inference_mode()
    def try_recording(self, device: torch.device) -> None:
        """Records a pass over one token. Raises an error for a class that waits for the host."""
        cache = self._model.new_cache(2, 16)
        one = torch.ones(1, dtype=torch.int32, device=device)
        batch = AttentionBatch.of_decodes(
            torch.full((1,), -1, dtype=torch.int64, device=device),
            torch.zeros((1, 1), dtype=torch.int32, device=device),
            one,
            16,
        )
        zero = torch.zeros(1, dtype=torch.int64, device=device)

        def run() -> None:
            self._model.vocab_part(self.forward(zero, zero, cache, batch))

        with capturing(device):
            run()  # compiles, and lets the libraries make their workspaces
            captured(run)


@dataclass(frozen=True, slots=True)
class _Pass:
    """Sequences that a model with states computes in one call: as many tokens of each."""

    tokens: Tensor  # [N] int64, of the step's T
    num_sequences: int
    batch: AttentionBatch
    snapshot: int | None = None  # made after it, of a sequence with more tokens in the next pass

    @property
    def is_cut(self) -> bool:
        """True if its sequence goes on in the next pass."""
        return self.snapshot is not None


def _passes(batch: AttentionBatch) -> Iterator[_Pass]:
    """The passes of a step: one for each of its spans."""
    for span in spans(batch):
        if batch.is_decode:
            tokens = torch.arange(len(span.tokens), device=batch.context_lens.device)
            yield _Pass(tokens, len(tokens), batch)
        else:
            yield _part(batch, span)


def _part(batch: AttentionBatch, span: StateSpan) -> _Pass:
    """The pass of a span."""
    device, length = batch.slot_mapping.device, len(span.tokens) // len(span.sequences)
    rows = torch.tensor(span.sequences, device=device)
    index = torch.tensor(span.tokens, device=device)
    ends = torch.arange(len(span.sequences) + 1, dtype=torch.int32, device=device) * length

    def of_part(whole: AttentionBatch) -> AttentionBatch:
        return replace(
            whole,
            slot_mapping=whole.slot_mapping[index],
            block_tables=whole.block_tables[rows],
            context_lens=whole.context_lens[rows] - span.num_after,
            cu_seqlens_q=ends,
            max_seqlen_q=length,
            parts=None,  # of the whole step
            slots=None if whole.slots is None else whole.slots[rows],
            state_cuts=(),
            pictures=None if whole.pictures is None else whole.pictures.of(index),
        )

    return _Pass(
        index,
        len(span.sequences),
        replace(of_part(batch), others=tuple(map(of_part, batch.others))),
        span.snapshot,
    )
