"""Times attention backends on this device and compares their results with a reference.

A few shapes of decode and prefill, on a temporary KV cache. Decode steps are timed as CUDA graph
replays, which also checks that the backend can be captured. Results are compared on the timed
batches and on small ones, where one key too many or too few has a large effect.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from kernels.attention_kind import AttentionKind
from worker_svc.attention.backend import AttentionTiming, Backend
from worker_svc.attention.batch import AttentionBatch, HeadLayout
from worker_svc.attention.call import AttentionCall
from worker_svc.attention.layer_kv import LayerKv
from worker_svc.device.capture_stream import capture_stream, captured
from worker_svc.protocol.step import Limits
from worker_svc.tuning.attention import Unfit
from worker_svc.tuning.stopwatch import least_us

CONTEXT = 1024
LONG_CONTEXT = 4096
CHUNK = 2048
# Larger than any cache of the device, so that keys and values are read from memory.
POOL_TOKENS = 1 << 16
CALLS = 4
# Maximum relative error of 16-bit results: each rounds by up to 2^-9 several times.
TOLERANCE = 2e-2


@dataclass(frozen=True, slots=True)
class Shape:
    """A batch of equal sequences."""

    kind: str
    num_seqs: int
    context: int  # tokens per sequence, after the step
    num_queries: int  # per sequence

    def __str__(self) -> str:
        if self.kind == "decode":
            return f"{self.num_seqs} x {self.context}"
        return f"{self.num_seqs} x {self.num_queries} of {self.context}"


def shapes(limits: Limits) -> list[Shape]:
    """Timed shapes: decode with few and many rows, whole prompts, a chunk of a long prompt.

    Prefills are large enough that launch overhead does not count.
    """
    budget, longest = limits.max_num_batched_tokens, limits.max_model_len
    most = min(limits.max_num_seqs, budget)
    context = min(CONTEXT, longest)
    prompt = min(context, budget)
    num_prompts = min(most, budget // prompt)
    return [
        *(Shape("decode", size, context, 1) for size in sorted({1, min(32, most), most})),
        Shape("prefill", num_prompts, prompt, prompt),
        Shape("prefill", 1, min(LONG_CONTEXT, longest), min(CHUNK, budget, longest)),
    ]


def trials(limits: Limits, window: int | None) -> list[tuple[str, list[tuple[int, int]]]]:
    """Batches to compare, by kind, as (context, queries) of each sequence.

    Chunks over a cached context, contexts around block boundaries, padding rows as in CUDA graphs,
    and sequences without queries; with a window contexts of its length, a little more and far more.
    """
    block, longest = limits.block_size, limits.max_model_len
    contexts = [0, 1, block - 1, block, block + 1, 3 * block + 2]
    chunks = [(40, 9), (33, 33), (3 * block + 1, 2), (block, 1), (0, 1), (block + 1, 0)]
    if window is not None:
        contexts += [window, window + 1, 2 * window]
        chunks += [(window + 1, 3), (2 * window, 9)]
    return [
        ("decode", [(min(context, longest), 1) for context in contexts]),
        ("prefill", [(min(context, longest), min(n, longest)) for context, n in chunks]),
    ]


class Clock:
    """Times backends and checks that their results match the reference's."""

    def __init__(
        self,
        heads: HeadLayout,
        kind: AttentionKind,
        dtype: torch.dtype,
        device: torch.device,
        limits: Limits,
        reference: Backend,
    ) -> None:
        self._limits = limits
        self._reference = reference
        self._heads = heads
        self._kind = kind
        self._random = torch.Generator(device).manual_seed(0)
        self._device = device
        num_blocks = max(2, POOL_TOKENS // limits.block_size)
        size = (num_blocks, limits.block_size, 2, heads.num_kv_heads, heads.head_dim)
        cache = torch.empty(size, dtype=dtype, device=device).normal_(generator=self._random)
        self._kv = LayerKv.of(cache.flatten(0, 1), limits.block_size)
        self._sinks: Tensor | None = None  # [H], where the kind has them
        if kind.has_sinks:
            sinks = torch.empty(heads.num_heads, dtype=dtype, device=device)
            self._sinks = sinks.normal_(generator=self._random)

    @torch.inference_mode()
    def measure(self, backend: Backend) -> list[AttentionTiming]:
        """Times all shapes. Raises Unfit for wrong results, or any error of the backend."""
        self.check(backend)
        return [
            AttentionTiming(
                shape.kind, self._named(shape), backend.name, self._time(backend, shape)
            )
            for shape in shapes(self._limits)
        ]

    @torch.inference_mode()
    def check(self, backend: Backend) -> None:
        """Raises Unfit unless the backend's results match the reference's on all small batches."""
        for kind, sequences in trials(self._limits, self._kind.window):
            self._compare(backend, kind, sequences, f"{len(sequences)} short sequences")

    def _named(self, shape: Shape) -> str:
        """The shape in words, with what makes layers of the kind other than usual."""
        return str(shape) if self._kind.is_plain else f"{shape}, {self._kind}"

    def _time(self, backend: Backend, shape: Shape) -> float:
        sequences = [(shape.context, shape.num_queries)] * shape.num_seqs
        attend = self._compare(backend, shape.kind, sequences, str(shape))
        return self._replayed_us(attend) if shape.kind == "decode" else self._called_us(attend)

    def _compare(
        self, backend: Backend, kind: str, sequences: Sequence[tuple[int, int]], what: str
    ) -> Callable[[], Tensor]:
        """Returns the backend's call after checking it. Raises Unfit if its result is wrong."""
        q, batch = self._inputs(sequences)
        call = AttentionCall(q, self._kv, batch, self._kind, sinks=self._sinks)

        def attend(by: Backend = backend) -> Tensor:
            return by.decode(call) if kind == "decode" else by.prefill(call)

        distance = _distance(attend(), attend(self._reference))
        if not distance <= TOLERANCE:
            raise Unfit(f"{kind} of {what} is {distance:.1e} away from ours")
        return attend

    def _inputs(self, sequences: Sequence[tuple[int, int]]) -> tuple[Tensor, AttentionBatch]:
        """Random queries and random block tables for the (context, queries) of each sequence."""
        device, heads = self._device, self._heads
        contexts, lengths = zip(*sequences, strict=True)
        q = torch.empty(
            (sum(lengths), heads.num_heads, heads.head_dim), dtype=self._kv.k.dtype, device=device
        ).normal_(generator=self._random)
        tables = torch.randint(
            1, len(self._kv.k), (len(sequences), self._limits.max_blocks_per_seq),
            dtype=torch.int32, device=device, generator=self._random,
        )  # fmt: skip
        return q, AttentionBatch(
            slot_mapping=torch.empty(0, dtype=torch.int64, device=device),  # nothing is written
            block_tables=tables,
            context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
            cu_seqlens_q=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device),
            max_seqlen_q=max(lengths),
            max_context_len=max(contexts),
        )

    def _replayed_us(self, attend: Callable[[], Tensor]) -> float:
        stream = capture_stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            graph = captured(partial(_call, attend))
        torch.cuda.current_stream(self._device).wait_stream(stream)
        return _call_us(graph.replay)

    def _called_us(self, attend: Callable[[], Tensor]) -> float:
        return _call_us(partial(_call, attend))


def _call(attend: Callable[[], Tensor]) -> None:
    for _ in range(CALLS):
        attend()


def _call_us(work: Callable[[], None]) -> float:
    """Shortest time of one of the calls in `work`, in microseconds."""
    return least_us([work], waits=True)[0] / CALLS


def _distance(found: Tensor, expected: Tensor) -> float:
    found, expected = found.double(), expected.double()
    return float((found - expected).norm() / expected.norm())
