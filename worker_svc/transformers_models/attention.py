"""The attention function that transformers' classes call: over the paged cache, without masks.

transformers builds masks for the attention functions that it knows; for this one it builds none,
and says by keywords what a layer sees. A keyword that is not known is refused by its name.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from kernels.attention_kind import AttentionKind
from worker_svc.attention import torch_backend
from worker_svc.attention.backend import AttentionChoice
from worker_svc.attention.batch import AttentionBatch, HeadLayout, fuses
from worker_svc.attention.call import AttentionCall
from worker_svc.attention.layer_cache import KvShape, LayerCache
from worker_svc.attention.page_cache import PageCache
from worker_svc.models.spec import UnsupportedModel

NAME = "pagewire"  # of the function, as a value of `attn_implementation`
CHUNK = "pagewire_chunk"  # an attribute of attention modules: their chunk, which no call tells

# Keywords that change nothing here, whatever their value.
_INERT = {
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "logits_to_keep",
    "max_length_k",
    "max_length_q",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "use_cache",
}


_LEAST_WINDOW = 2  # of a KV group


class UnservedAttention(ValueError):
    """A layer asks for attention that the paged cache does not serve."""


@contextmanager
def refused_if_it_fails(made: type) -> Iterator[None]:
    """Raises UnsupportedModel for whatever a class raises; what memory lacks is no refusal."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError, UnsupportedModel):
        raise
    except UnservedAttention as error:
        raise UnsupportedModel(f"{made.__name__}: {error}") from None
    except Exception as error:  # what classes do is not known here
        reason = f"{type(error).__name__}: {error}"
        raise UnsupportedModel(
            f"{made.__name__} cannot be computed over a paged cache: {reason}"
        ) from error


@dataclass(frozen=True, slots=True)
class LayerKind:
    """The attention of one layer, as its calls describe it."""

    num_heads: int
    kv: KvShape
    attention: AttentionKind


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One layer's call, for T tokens in the order of the step."""

    layer: int
    kind: LayerKind
    q: Tensor  # [T, H, D]
    k: Tensor  # [T, Hkv, D]
    v: Tensor  # [T, Hkv, Dv]
    sinks: Tensor | None  # [H]
    key_source: Tensor  # the tensor that k is a view of: layers that share keys have the same one


class Attender(Protocol):
    """The receiver of all calls of one forward pass."""

    def attend(self, call: LayerCall) -> Tensor:
        """Attention of the call's queries -> [T, H, Dv]."""


_attender: ContextVar[Attender] = ContextVar("attender")


@contextmanager
def attending(attender: Attender) -> Iterator[None]:
    """Directs the calls of forward passes to `attender`."""
    token = _attender.set(attender)
    try:
        yield
    finally:
        _attender.reset(token)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [B, H, N, D], key and value [B, Hkv, N, D or Dv] -> [B, N, H, Dv]."""
    name = type(module).__name__
    strange = sorted(
        word for word, given in others.items() if given is not None and word not in _INERT
    )
    if strange:
        raise UnservedAttention(f"{name} calls attention with {strange[0]}, which is not served")
    if attention_mask is not None:
        raise UnservedAttention(f"{name} brings an attention mask of its own")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UnservedAttention(f"{name} attends in both directions")
    num_rows, num_heads, num_tokens, head_dim = query.shape
    kind = LayerKind(
        num_heads=num_heads,
        kv=KvShape(key.shape[1], head_dim, value.shape[3]),
        attention=AttentionKind(
            scale=float(head_dim**-0.5 if scaling is None else scaling),
            window=sliding_window,
            chunk=getattr(module, CHUNK, None),
            softcap=softcap,
            has_sinks=s_aux is not None,
        ),
    )
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnservedAttention(f"{name} does not say which layer it is")
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out = _attender.get().attend(LayerCall(layer, kind, q, k, v, s_aux, key))
    return out.view(num_rows, num_tokens, num_heads, -1), None


def register() -> None:
    """Makes the function known to transformers."""
    AttentionInterface.register(NAME, _attend)


class Probe:
    """Notes the kind of each layer's attention; attends to nothing."""

    def __init__(self) -> None:
        self.kinds: dict[int, LayerKind] = {}
        self.sources: dict[int, int] = {}  # a layer that has no keys of its own: whose it reads
        self._keys: dict[int, Tensor] = {}

    def attend(self, call: LayerCall) -> Tensor:
        """See `Attender`."""
        if call.layer in self.kinds:
            raise UnservedAttention(f"layer {call.layer} attends twice")
        self.kinds[call.layer] = call.kind
        for layer, keys in self._keys.items():
            if keys is call.key_source:
                self.sources[call.layer] = layer
                break
        else:
            self._keys[call.layer] = call.key_source
        return call.q.new_zeros((*call.q.shape[:2], call.kind.kv.v_dim))


class KvLayout:
    """The attention of all layers, and where each has its keys and values."""

    def __init__(self, kinds: dict[int, LayerKind], sources: dict[int, int]) -> None:
        """`sources` says of a layer that stores nothing whose keys and values it reads."""
        self.kinds = kinds
        self.sources = sources
        owners = sorted(kinds.keys() - sources.keys())
        self.shapes = [kinds[layer].kv for layer in owners]  # of the layers that store
        places = {layer: index for index, layer in enumerate(owners)}
        # The index in `shapes` of what each layer reads.
        self.places = {layer: places[sources.get(layer, layer)] for layer in kinds}

    def windows(self, max_model_len: int) -> list[int | None]:
        """Tokens that each layer of `shapes` is read back for; None: all of the longest context."""
        farthest = [0] * len(self.shapes)
        for layer, kind in self.kinds.items():
            # A chunk reaches no farther back than a window of its size.
            reach = kind.attention.window or kind.attention.chunk or max_model_len
            place = self.places[layer]
            farthest[place] = max(farthest[place], reach, _LEAST_WINDOW)
        return [None if reach >= max_model_len else reach for reach in farthest]


class TorchAttender:
    """Stores and attends by operations of torch, for one pass over some of a step's sequences."""

    def __init__(
        self, layout: KvLayout, kv_cache: LayerCache | PageCache, batch: AttentionBatch
    ) -> None:
        self._layout = layout
        self._kv_cache = kv_cache
        self._batch = batch
        self._attention = torch_backend.TorchAttention()

    def attend(self, call: LayerCall) -> Tensor:
        """See `Attender`."""
        kind = self._layout.kinds[call.layer]
        if call.kind != kind:
            raise UnservedAttention(f"layer {call.layer} attends in another way than at first")
        kv = self._kv_cache.of_layer(self._layout.places[call.layer])
        is_stored = call.layer in self._layout.sources
        k, v = (None, None) if is_stored else (call.k, call.v)
        batch = self._batch.of_group(kv.group)
        return self._attention.attend(
            AttentionCall(call.q, kv, batch, kind.attention, k, v, call.sinks)
        )


class KernelAttention:
    """Stores and attends by the Triton kernels; waits for nothing, so a graph can record it."""

    def __init__(self, layout: KvLayout, like: Tensor) -> None:
        """`like` has the type and the device of what is attended to."""
        from worker_svc.attention.storing import StoringAttention  # noqa: PLC0415 - needs Triton
        from worker_svc.attention.triton import TritonAttention  # noqa: PLC0415

        self._layout = layout
        kind = next(iter(layout.kinds.values()))  # all have as many heads
        heads = HeadLayout(kind.num_heads, kind.kv.num_kv_heads, kind.kv.k_dim)
        triton = TritonAttention(heads, like)
        choice = AttentionChoice(triton, triton, triton)
        self._attention = StoringAttention(lambda kind: choice)
        self._kv_cache: LayerCache | PageCache | None = None
        self._batch: AttentionBatch | None = None

    @staticmethod
    def serves(layout: KvLayout) -> bool:
        """True if the kernels have tiles for all layers, and one size of tiles for all."""
        kinds = list(layout.kinds.values())
        sizes = {(kind.num_heads, kind.kv) for kind in kinds}
        return len(sizes) == 1 and all(
            fuses(kind.kv.k_dim) and kind.kv.k_dim == kind.kv.v_dim and kind.attention.chunk is None
            for kind in kinds
        )

    def of_step(self, kv_cache: LayerCache | PageCache, batch: AttentionBatch) -> Self:
        """The same for a pass over this batch."""
        self._kv_cache, self._batch = kv_cache, batch
        return self

    def attend(self, call: LayerCall) -> Tensor:
        """See `Attender`."""
        kv_cache, batch = self._kv_cache, self._batch
        assert kv_cache is not None and batch is not None  # of a step
        kv = kv_cache.of_layer(self._layout.places[call.layer])
        batch = batch.of_group(kv.group)
        is_stored = call.layer in self._layout.sources
        k, v = (None, None) if is_stored else (call.k, call.v)
        kind = self._layout.kinds[call.layer].attention
        return self._attention.attend(AttentionCall(call.q, kv, batch, kind, k, v, call.sinks))
