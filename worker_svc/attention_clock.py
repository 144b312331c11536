"""How long a backend attends on this device, and whether it gives what ours gives.

A few shapes of each kind, on a scratch cache that is gone afterwards. Decode steps are timed as
they will run, replayed from a graph, which shows as well that the backend can be captured.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.attention import AttentionBatch, HeadLayout
from worker_svc.attention_backend import Backend, Timing
from worker_svc.attention_choice import Unfit
from worker_svc.step import Limits

CONTEXT = 1024
LONG_CONTEXT = 4096
CHUNK = 2048
# More than any cache between memory and the processors holds.
POOL_TOKENS = 1 << 16
CALLS = 4
ROUNDS = 3
# Relative distance of two results in 16 bits: each rounds by up to 2^-9 several times.
TOLERANCE = 2e-2


@dataclass(frozen=True, slots=True)
class Shape:
    """A batch of equal sequences."""

    kind: str
    num_seqs: int
    context: int  # after the step
    num_queries: int  # of each sequence

    def __str__(self) -> str:
        if self.kind == "decode":
            return f"{self.num_seqs} x {self.context}"
        return f"{self.num_seqs} x {self.num_queries} of {self.context}"


def shapes(limits: Limits) -> list[Shape]:
    """What is timed under these limits: few rows and many, whole prompts and a chunk of a long one.

    Prefills are large, so that it is the device that takes the time.
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


class Clock:
    """Times backends whose results are near the reference's."""

    def __init__(
        self,
        heads: HeadLayout,
        dtype: torch.dtype,
        device: torch.device,
        limits: Limits,
        reference: Backend,
    ) -> None:
        self._shapes = shapes(limits)
        self._reference = reference
        self._heads = heads
        self._block_size = limits.block_size
        self._width = limits.max_blocks_per_seq
        self._random = torch.Generator(device).manual_seed(0)
        self._device = device
        num_blocks = max(2, POOL_TOKENS // self._block_size)
        size = (num_blocks, self._block_size, 2, heads.num_kv_heads, heads.head_dim)
        cache = torch.empty(size, dtype=dtype, device=device).normal_(generator=self._random)
        self._k, self._v = cache.unbind(2)  # as in KVCache

    @torch.inference_mode()
    def measure(self, backend: Backend) -> list[Timing]:
        """Every shape. Raises Unfit, or whatever the backend raises."""
        return [
            Timing(shape.kind, str(shape), backend.name, self._time(backend, shape))
            for shape in self._shapes
        ]

    def _time(self, backend: Backend, shape: Shape) -> float:
        q, batch = self._inputs(shape)

        def attend(by: Backend = backend) -> Tensor:
            call = by.decode if shape.kind == "decode" else by.prefill
            return call(q, self._k, self._v, batch)

        distance = _distance(attend(), attend(self._reference))
        if not distance <= TOLERANCE:
            raise Unfit(f"{shape.kind} of {shape} is {distance:.1e} away from ours")
        return self._replayed_us(attend) if shape.kind == "decode" else self._called_us(attend)

    def _inputs(self, shape: Shape) -> tuple[Tensor, AttentionBatch]:
        num, device = shape.num_seqs, self._device
        q = torch.empty(
            (num * shape.num_queries, self._heads.num_heads, self._heads.head_dim),
            dtype=self._k.dtype, device=device,
        ).normal_(generator=self._random)  # fmt: skip
        tables = torch.randint(
            1, len(self._k), (num, self._width), dtype=torch.int32, device=device,
            generator=self._random,
        )  # fmt: skip
        starts = torch.arange(num + 1, dtype=torch.int32, device=device) * shape.num_queries
        return q, AttentionBatch(
            slot_mapping=torch.empty(0, dtype=torch.int64, device=device),  # nothing is written
            block_tables=tables,
            context_lens=torch.full((num,), shape.context, dtype=torch.int32, device=device),
            cu_seqlens_q=starts,
            max_seqlen_q=shape.num_queries,
            max_context_len=shape.context,
        )

    def _replayed_us(self, attend: Callable[[], Tensor]) -> float:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for _ in range(CALLS):
                    attend()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        return _least_us(graph.replay)

    def _called_us(self, attend: Callable[[], Tensor]) -> float:
        def calls() -> None:
            for _ in range(CALLS):
                attend()

        return _least_us(calls)


def _least_us(work: Callable[[], None]) -> float:
    """The least time of one of the calls in `work`; the first round is for warming up."""
    found = []
    for _ in range(1 + ROUNDS):
        start, end = _event(), _event()
        start.record()
        work()
        end.record()
        end.synchronize()
        found.append(1e3 * float(start.elapsed_time(end)) / CALLS)
    return min(found[1:])


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _distance(found: Tensor, expected: Tensor) -> float:
    found, expected = found.double(), expected.double()
    return float((found - expected).norm() / expected.norm())
