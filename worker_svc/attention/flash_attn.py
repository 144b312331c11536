"""flash-attn as an attention backend: versions 2, 3 and 4, those that are installed.

It finds the versions that can serve a model on this device, reports why others cannot, and adapts
batches to each one's call. Importing this module needs none of them.
"""

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention_kind import AttentionKind
from worker_svc.attention.batch import AttentionBatch
from worker_svc.attention.call import AttentionCall

DTYPES = (torch.float16, torch.bfloat16)
LARGEST_HEAD = 256

# What calls may take beyond full attention.
_WORDS = ("window_size", "softcap")
_NONE: Mapping[str, Any] = {}

Load = Callable[[str], ModuleType]


@dataclass(frozen=True, slots=True)
class Setup:
    """The model's and the device's parameters of attention."""

    head_dim: int
    dtype: torch.dtype
    block_size: int
    capability: tuple[int, int]  # of the CUDA device
    kv_dtype: torch.dtype | None = None  # of the cache; None: as dtype


class Unsupported(ValueError):
    """Raised when a version cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class InstalledVersions:
    """Usable versions, the newest first, and why each of the others is not."""

    backends: "tuple[FlashAttention, ...]"
    refusals: tuple[str, ...]


class FlashAttention(ABC):
    """Common part of the versions. Each call allocates its result and ignores `out`."""

    version: ClassVar[int]
    module: ClassVar[str]
    functions: ClassVar[dict[str, tuple[str, ...]]]  # function name to required parameters

    def __init__(self, setup: Setup, load: Load = importlib.import_module) -> None:
        """Raises Unsupported."""
        self.check(setup)
        self._functions = _functions(self.module, self.functions, load)
        # Releases differ in what their calls take beyond full attention.
        self._words = {word for word in _WORDS if _all_take(self._functions.values(), word)}

    @property
    def name(self) -> str:
        return f"flash-attn {self.version}"

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Raises Unsupported unless the version, if installed, has kernels for this."""
        if setup.dtype not in DTYPES:
            raise Unsupported(f"dtype {_name(setup.dtype)} is neither float16 nor bfloat16")
        if setup.kv_dtype not in (None, setup.dtype):
            # What takes FP8 keys multiplies in FP8, which loses more than storing them does.
            raise Unsupported(f"a KV cache of {_name(setup.kv_dtype)}, ours alone widen it")
        if setup.head_dim % 8 or setup.head_dim > LARGEST_HEAD:
            raise Unsupported(
                f"heads of {setup.head_dim}: want a multiple of 8, at most {LARGEST_HEAD}"
            )

    def serves(self, kind: AttentionKind) -> bool:
        """See `Backend`."""
        return kind.chunk is None and not kind.has_sinks and self._words.issuperset(_words_of(kind))

    def decode(self, call: AttentionCall) -> Tensor:
        """See `Backend`."""
        assert call.kv.scales is None  # see `check`
        found = self._attend(call, call.q.unsqueeze(1), **_words_of(call.kind))  # [B, 1, H, D]
        found = found.squeeze(1)
        return found if call.out is None else call.out.copy_(found)

    def prefill(self, call: AttentionCall) -> Tensor:
        """See `Backend`."""
        assert call.kv.scales is None  # see `check`
        batch = call.batch
        queries = {"cu_seqlens_q": batch.cu_seqlens_q, "max_seqlen_q": batch.max_seqlen_q}
        found = self._attend(call, call.q, queries, **_words_of(call.kind))
        return found if call.out is None else call.out.copy_(found)

    @abstractmethod
    def _attend(
        self, call: AttentionCall, q: Tensor, queries: Mapping[str, Any] = _NONE, **words: Any
    ) -> Tensor:
        """Calls the version; the result has the shape of q.

        `queries` has the starts of each sequence's queries; none for a decode step, with q [B, 1,
        H, D]. `words` are those of the layer's kind.
        """


class FlashAttention4(FlashAttention):
    """Written in CuTe DSL: compiled at its first call, for Hopper and Blackwell."""

    version = 4
    module = "flash_attn.cute"
    functions: ClassVar = {
        "flash_attn_varlen_func": (
            *("q", "k", "v", "cu_seqlens_q", "max_seqlen_q", "seqused_k", "page_table"),
            *("softmax_scale", "causal", "num_splits"),
        )
    }

    def __init__(self, setup: Setup, load: Load = importlib.import_module) -> None:
        super().__init__(setup, load)
        # 0 lets it split contexts when rows are few, by shapes alone; on Hopper it cannot split.
        self._decode_splits = 1 if setup.capability[0] == 9 else 0

    @classmethod
    def check(cls, setup: Setup) -> None:
        super().check(setup)
        _need_capability(setup, 9, 11)
        if setup.capability[0] > 9 and 128 < setup.head_dim < 256:
            raise Unsupported(f"heads of {setup.head_dim}: want at most 128, or 256")

    def _attend(
        self, call: AttentionCall, q: Tensor, queries: Mapping[str, Any] = _NONE, **words: Any
    ) -> Tensor:
        kv, batch = call.kv, call.batch
        num_splits = 1 if queries else self._decode_splits
        found: tuple[Tensor, Any] = self._functions["flash_attn_varlen_func"](
            q=q, k=kv.k, v=kv.v, seqused_k=batch.context_lens, page_table=batch.block_tables,
            softmax_scale=call.kind.scale, causal=True, num_splits=num_splits, **queries, **words,
        )  # fmt: skip
        return found[0]  # followed by the sums of exponentials


class FlashAttention3(FlashAttention):
    """For Hopper. One function serves both kinds of steps.

    The device decides how to split contexts, in kernels of the same call: without scheduler
    metadata prepared outside, a captured graph decides anew at each replay.
    """

    version = 3
    module = "flash_attn_interface"
    functions: ClassVar = {
        "flash_attn_with_kvcache": (
            *("q", "k_cache", "v_cache", "cache_seqlens", "page_table", "cu_seqlens_q"),
            *("max_seqlen_q", "softmax_scale", "causal"),
        )
    }

    @classmethod
    def check(cls, setup: Setup) -> None:
        super().check(setup)
        _need_capability(setup, 9, 9)

    def _attend(
        self, call: AttentionCall, q: Tensor, queries: Mapping[str, Any] = _NONE, **words: Any
    ) -> Tensor:
        kv, batch = call.kv, call.batch
        found: Tensor = self._functions["flash_attn_with_kvcache"](
            q=q, k_cache=kv.k, v_cache=kv.v, cache_seqlens=batch.context_lens,
            page_table=batch.block_tables, softmax_scale=call.kind.scale, causal=True,
            **queries, **words,
        )  # fmt: skip
        return found


class FlashAttention2(FlashAttention):
    """For Ampere and later; its pages are multiples of 256 tokens."""

    version = 2
    module = "flash_attn"
    functions: ClassVar = {
        "flash_attn_with_kvcache": (
            *("q", "k_cache", "v_cache", "cache_seqlens", "block_table", "softmax_scale"),
            "causal",
        ),
        "flash_attn_varlen_func": (
            *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
            *("softmax_scale", "causal", "block_table"),
        ),
    }

    def __init__(self, setup: Setup, load: Load = importlib.import_module) -> None:
        super().__init__(setup, load)
        self._step: AttentionBatch | None = None  # the step being computed
        self._cu_seqlens_k = torch.empty(0)

    @classmethod
    def check(cls, setup: Setup) -> None:
        super().check(setup)
        _need_capability(setup, 8, None)
        if setup.block_size % 256:
            raise Unsupported(f"block_size {setup.block_size} is no multiple of 256")

    def _attend(
        self, call: AttentionCall, q: Tensor, queries: Mapping[str, Any] = _NONE, **words: Any
    ) -> Tensor:
        kv, batch = call.kv, call.batch
        if queries:
            found: Tensor = self._functions["flash_attn_varlen_func"](
                q=q, k=kv.k, v=kv.v, cu_seqlens_k=self._starts(batch),
                max_seqlen_k=batch.max_context_len, block_table=batch.block_tables,
                softmax_scale=call.kind.scale, causal=True, **queries, **words,
            )  # fmt: skip
        else:
            found = self._functions["flash_attn_with_kvcache"](
                q=q, k_cache=kv.k, v_cache=kv.v, cache_seqlens=batch.context_lens,
                block_table=batch.block_tables, softmax_scale=call.kind.scale, causal=True, **words,
            )  # fmt: skip
        return found

    def _starts(self, batch: AttentionBatch) -> Tensor:
        """The start of each sequence's keys, as if concatenated: [B + 1] int32."""
        if batch is not self._step:  # once for all layers
            self._step = batch
            self._cu_seqlens_k = F.pad(batch.context_lens.cumsum(0, dtype=torch.int32), (1, 0))
        return self._cu_seqlens_k


VERSIONS: tuple[type[FlashAttention], ...] = (FlashAttention4, FlashAttention3, FlashAttention2)


def find(setup: Setup, load: Load = importlib.import_module) -> InstalledVersions:
    """Looks for all versions."""
    backends, refusals = [], []
    for version in VERSIONS:
        try:
            backends.append(version(setup, load))
        except Unsupported as error:
            refusals.append(f"flash-attn {version.version}: {error}")
    return InstalledVersions(tuple(backends), tuple(refusals))


def _words_of(kind: AttentionKind) -> dict[str, Any]:
    """The keywords of a kind beyond full attention."""
    words: dict[str, Any] = {}
    if kind.window is not None:
        words["window_size"] = (kind.window - 1, 0)  # keys before the query, and after it
    if kind.softcap is not None:
        words["softcap"] = kind.softcap
    return words


def _all_take(functions: Iterable[Callable[..., Any]], word: str) -> bool:
    return all(word in inspect.signature(function).parameters for function in functions)


def _functions(
    module: str, wanted: dict[str, tuple[str, ...]], load: Load
) -> dict[str, Callable[..., Any]]:
    try:
        loaded = load(module)
    except ModuleNotFoundError as error:
        if error.name in (module, module.partition(".")[0]):
            raise Unsupported("not installed") from None
        raise Unsupported(f"{module} cannot be imported: {error}") from error
    except Exception as error:  # a library built for another torch fails in many ways
        raise Unsupported(f"{module} cannot be imported: {error}") from error
    return {name: _function(loaded, name, parameters) for name, parameters in wanted.items()}


def _function(module: ModuleType, name: str, parameters: Sequence[str]) -> Callable[..., Any]:
    function: Callable[..., Any] | None = getattr(module, name, None)
    if function is None:
        raise Unsupported(f"{module.__name__} has no {name}")
    missing = [word for word in parameters if word not in inspect.signature(function).parameters]
    if missing:
        raise Unsupported(f"the installed {name} takes no {', '.join(missing)}")
    return function


def _need_capability(setup: Setup, least: int, most: int | None) -> None:
    major, minor = setup.capability
    if major < least or (most is not None and major > most):
        span = f"{least}.x or later" if most is None else f"{least}.x"
        span = f"{least}.x to {most}.x" if most and most > least else span
        raise Unsupported(f"it needs compute capability {span}, the device has {major}.{minor}")


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
