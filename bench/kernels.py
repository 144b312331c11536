"""Times every kernel at the shapes that matter, and the chip's limits. Needs a CUDA device.

Each number is one launch inside a CUDA graph of many. Weights and KV caches rotate through several
times the L2 cache, so that nothing is read from it that a real step would have to fetch.
"""

import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.harness.records import Results, add_json, new_parser
from kernels.attention import gate
from kernels.attention.decode_attention import paged_decode_attention
from kernels.attention.latent_attention import latent_attention, latent_decode_attention
from kernels.attention.latent_rope import rotate_write_latents
from kernels.attention.prefill_attention import paged_attention
from kernels.attention.rope import norm_rope_write_kv
from kernels.attention.workspace import decode_workspace
from kernels.attention_kind import AttentionKind
from kernels.cluster import decode_float8 as decode_float8_cache
from kernels.cluster.expert_rows import FewRowExperts
from kernels.experts.router import Router, route
from kernels.experts.weights import ExpertWeights
from kernels.gemm.linear import linear, pays
from kernels.gemm.tiled_linear import arrivals, tiled_linear
from kernels.norm.rms_norm import add_rms_norm, rms_norm
from kernels.norm.silu_and_mul import silu_and_mul
from kernels.recurrent.convolve import convolve
from kernels.recurrent.delta_net import update_delta_net
from kernels.recurrent.delta_rule import DeltaHeads
from kernels.recurrent.gated_norm import gated_rms_norm
from kernels.recurrent.mamba2 import update_mamba2
from kernels.recurrent.segments import Bounds, Segments
from kernels.recurrent.selective_scan import HeadParameters, ScanHeads
from kernels.sampling.filtered_draw import draw_filtered
from kernels.sampling.sample import Tokens, choose, find_candidates, output_ring
from kernels.sampling.slot_state import NUM_FIELDS, SEED, TEMPERATURE, TOP_K, TOP_P
from worker_svc.models.fused_experts import FusedExperts

COLD_BYTES = 300e6  # least size of all buffers in a rotation
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 16, 8, 128, 16
EPS = 1e-6
DECODE = [(1, 1000), (2, 576), (8, 576), (8, 1000), (32, 576), (32, 1000), (64, 576), (128, 576)]
DECODE += [(256, 576), (256, 800), (256, 2000), (1, 32000)]
FLOAT8 = [(32, 576), (64, 576), (96, 576), (128, 576), (256, 576), (64, 2000), (256, 2000)]
LATENT, TURNED, LATENT_HEADS = 512, 64, (16, 20, 128)  # of 8 ranks, GLM-4.7-Flash, DeepSeek V3
LATENT_DECODE = [(1, 1000), (1, 32000), (8, 1000), (32, 1000), (64, 4000), (256, 1000)]
PREFILL = [(8, 4096, 4096), (1, 8192, 8192), (16, 512, 512), (4, 512, 4096)]
RECURRENT = [(1, 1), (8, 1), (32, 1), (256, 1), (1, 512), (1, 8192), (8, 2048)]
EXPERT_ROWS = [1, 4, 32, 64, 256, 2048]
EXPERTS = {  # experts, hidden size, inner size, experts of a row
    "30B-A3B": (128, 2048, 768, 8),
    "35B-A3B": (257, 2048, 512, 9),
    "gpt-oss": (32, 2880, 2880, 4),
}
EXPERT_FORMATS = [("30B-A3B", 16, None), ("30B-A3B", 8, None), ("35B-A3B", 8, 128)]
EXPERT_FORMATS += [("gpt-oss", 16, None), ("gpt-oss", 4, 32)]
LINEAR = {  # (N, K) of the weight; gate_up is two halves
    "0.6B": {
        "qkv": (4096, 1024),
        "o": (1024, 2048),
        "gate_up": (6144, 1024),
        "down": (1024, 3072),
        "lm_head": (151936, 1024),
    },
    "8B": {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (24576, 4096),
        "down": (4096, 12288),
    },
}


@dataclass(frozen=True, slots=True)
class KernelTiming:
    """One line of the report; bytes and flops are the least for the shape."""

    kernel: str
    shape: str
    us: float
    num_bytes: float = 0.0
    flops: float = 0.0
    library_us: float | None = None

    def rate(self) -> str:
        if self.flops:
            return f"{self.flops / self.us / 1e6:7.1f} TFLOP/s"
        return f"{self.num_bytes / self.us / 1e6:7.2f} TB/s   "


def time_graph(calls: list[Callable[[], object]], rounds: int = 9) -> float:
    """Microseconds of one call, from the median replay of a graph of all of them."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls[0]()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times_ms = []
    for _ in range(rounds):
        start, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times_ms.append(start.elapsed_time(end))
    return float(statistics.median(times_ms)) * 1e3 / len(calls)


def rotation(num_bytes: float) -> int:
    """Number of copies of a working set of `num_bytes` that no cache can hold."""
    return max(2, min(64, int(COLD_BYTES / num_bytes) + 1))


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def ceilings() -> Iterator[KernelTiming]:
    """The rates of a large copy and a large GEMM of the library on this chip."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    num_bytes = 2.0 * source.numel() * source.element_size()
    us = time_graph([partial(torch.add, source, 1.0, out=target)] * 4)
    yield KernelTiming("copy", "2 GiB", us, num_bytes=num_bytes)
    a = randn(8192, 8192)
    yield KernelTiming(
        "matmul", "8192^3", time_graph([partial(torch.mm, a, a)] * 10), flops=2.0 * 8192**3
    )


def caches(batch: int, context: int, copies: int) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """`copies` pairs of K and V caches, and one table of shuffled blocks."""
    width = -(-context // BLOCK_SIZE)
    shape = (batch * width + 1, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    tables = torch.randperm(batch * width, device="cuda").view(batch, width).int() + 1
    return [(randn(*shape), randn(*shape)) for _ in range(copies)], tables


def decode_attention() -> Iterator[KernelTiming]:
    for batch, context in DECODE:
        num_bytes = 4.0 * batch * context * KV_HEADS * HEAD_DIM
        pairs, tables = caches(batch, context, rotation(num_bytes))
        lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        q = randn(batch, HEADS, HEAD_DIM)
        out, workspace = torch.empty_like(q), decode_workspace(q, KV_HEADS)
        rest = (tables, lens, AttentionKind(HEAD_DIM**-0.5), out, workspace)
        us = time_graph([partial(paged_decode_attention, q, k, v, *rest) for k, v in pairs])
        yield KernelTiming("decode_attention", f"{batch} x {context}", us, num_bytes=num_bytes)
        del pairs


def decode_float8() -> Iterator[KernelTiming]:
    """Over caches in e4m3: each of the kernels that there are for so many rows."""
    for heads in (16, 32):
        for batch, context in FLOAT8:
            yield from _decode_float8(heads, batch, context, torch.full((batch,), context))
        lengths = torch.linspace(50, 640, 200)[torch.randperm(200)]
        yield from _decode_float8(heads, 200, 640, lengths)


def _decode_float8(heads: int, batch: int, context: int, lengths: Tensor) -> Iterator[KernelTiming]:
    num_bytes = 2.0 * float(lengths.sum()) * KV_HEADS * HEAD_DIM
    pairs, tables = caches(batch, context, rotation(num_bytes))
    # A token's keys and values are neighbours, as in the worker's cache.
    stored = [torch.stack(pair, 2).to(torch.float8_e4m3fn).unbind(2) for pair in pairs]
    del pairs
    lens, q = lengths.int().cuda(), randn(batch, heads, HEAD_DIM)
    scales = torch.ones((4, KV_HEADS), device="cuda")
    out, workspace = torch.empty_like(q), decode_workspace(q, KV_HEADS)
    kernel = decode_float8_cache.kernel_for(q, stored[0][0])
    kind = AttentionKind(HEAD_DIM**-0.5)
    rest = (tables, lens, kind, out, workspace, scales)
    kinds: dict[str, list[Callable[[], object]]] = {"triton": [
        partial(paged_decode_attention, q, k, v, *rest) for k, v in stored
    ]}  # fmt: skip
    if kernel is not None:
        attend = kernel.attend
        kinds["shared out"] = [
            partial(attend, q, k, v, tables, lens, kind.scale, scales, out) for k, v in stored
        ]
    mean = float(lengths.float().mean())
    for name, calls in kinds.items():
        shape = f"{name}, {heads} heads, {batch} x {mean:.0f}"
        yield KernelTiming("decode_float8", shape, time_graph(calls), num_bytes=num_bytes)


def prefill_attention() -> Iterator[KernelTiming]:
    for batch, queries, context in PREFILL:
        [(k, v)], tables = caches(batch, context, 1)
        lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        cu = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * queries
        q = randn(batch * queries, HEADS, HEAD_DIM)
        out = torch.empty_like(q)
        args = (q, k, v, tables, lens, cu, queries, AttentionKind(HEAD_DIM**-0.5), out)
        us = time_graph([partial(paged_attention, *args)] * 4)
        seen = context - (queries - 1) / 2  # keys of the average query
        flops = 4.0 * batch * queries * seen * HEADS * HEAD_DIM
        yield KernelTiming(
            "prefill_attention", f"{batch} x {queries} of {context}", us, flops=flops
        )


def latents() -> Iterator[KernelTiming]:
    """Decodes and one prompt over latents, by the number of heads."""
    width, kind = LATENT + TURNED, AttentionKind(0.07)
    for heads in LATENT_HEADS:
        for batch, context in LATENT_DECODE:
            blocks = -(-context // BLOCK_SIZE)
            num_bytes = 2.0 * batch * context * width
            rows = [
                randn(batch * blocks + 1, BLOCK_SIZE, 1, width) for _ in range(rotation(num_bytes))
            ]
            tables = torch.randperm(batch * blocks, device="cuda").view(batch, blocks).int() + 1
            lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
            q = randn(batch, heads, width)
            calls: list[Callable[[], object]] = [
                partial(latent_decode_attention, q, cache, LATENT, tables, lens, kind)
                for cache in rows
            ]
            shape = f"{heads} heads {batch} x {context}"
            yield KernelTiming("latent_decode", shape, time_graph(calls), num_bytes=num_bytes)
            del rows, calls
        yield _latent_rope(heads, 64)
        length, blocks = 4096, 4096 // BLOCK_SIZE
        cache, q = randn(blocks + 1, BLOCK_SIZE, 1, width), randn(length, heads, width)
        tables = torch.randperm(blocks, device="cuda")[None].int() + 1
        ends = torch.tensor([0, length], dtype=torch.int32, device="cuda")
        args = (q, cache, LATENT, tables, ends[1:], ends, length, kind)
        us = time_graph([partial(latent_attention, *args)] * 4)
        flops = 2.0 * length * (length + 1) / 2 * heads * (width + LATENT)
        yield KernelTiming("latent_prefill", f"{heads} heads {length}", us, flops=flops)


def _latent_rope(heads: int, rows: int) -> KernelTiming:
    """Kernels between projections and attention, for queries of 128 numbers that do not turn."""
    width, table = LATENT + TURNED, torch.randn(1000, TURNED, device="cuda")
    slots = torch.arange(rows, device="cuda")
    cache = randn(rows, BLOCK_SIZE, 1, width)
    rest = (slots, table, torch.ones_like(randn(LATENT)), EPS, cache, slots)
    copies = [(randn(rows, heads, 128 + TURNED), randn(rows, width)) for _ in range(20)]
    calls: list[Callable[[], object]] = [
        partial(rotate_write_latents, q, kv, *rest, is_interleaved=True) for q, kv in copies
    ]
    num_bytes = 2.0 * rows * (2 * heads * TURNED + 2 * width)
    return KernelTiming("latent_rope", f"{heads} heads {rows}", time_graph(calls), num_bytes)


def small_linear() -> Iterator[KernelTiming]:
    return of_layers(one_linear, (1, 2, 4, 8, 16, 32))


def tiled_layers() -> Iterator[KernelTiming]:
    return of_layers(one_tiled_layer, (2, 4, 8, 16, 24, 32))


def of_layers(
    one: Callable[[str, str, int, list[Tensor]], KernelTiming], row_counts: Sequence[int]
) -> Iterator[KernelTiming]:
    """Each layer of each model for each row count; one layer's weights at a time."""
    for model, layers in LINEAR.items():
        for name, (n, k) in layers.items():
            weights = [randn(n, k).mul_(k**-0.5) for _ in range(rotation(2.0 * n * k))]
            for rows in row_counts:
                yield one(model, name, rows, weights)
            del weights


def one_linear(model: str, name: str, rows: int, weights: list[Tensor]) -> KernelTiming:
    """With the fused neighbours of a layer; the library's time is the GEMM alone."""
    n, k = weights[0].shape
    gated, normed = name == "gate_up", name in ("qkv", "gate_up")
    x, norm_weight = randn(rows, k), randn(k) if normed else None
    residual = randn(rows, n) if name in ("o", "down") else None
    ours = partial(linear, norm_weight=norm_weight, eps=EPS, gated=gated, residual=residual)
    us, library_us = beside_library(ours, x, weights)
    chosen = "" if pays(rows, n, k) else ", library preferred"
    return KernelTiming(
        "linear", f"{model} {name}, {rows} rows{chosen}", us, 2.0 * n * k, library_us=library_us
    )


def one_tiled_layer(model: str, name: str, rows: int, weights: list[Tensor]) -> KernelTiming:
    """As above; rows are divided by root mean squares where this needs no kernel."""
    n, k = weights[0].shape
    gated = name == "gate_up"
    x, arrived = randn(rows, k), arrivals(weights[0])
    residual = randn(rows, n) if name in ("o", "down") else None
    ours = partial(
        tiled_linear, arrived=arrived, residual=residual, gated=gated, divided=gated, eps=EPS
    )
    us, library_us = beside_library(ours, x, weights)
    return KernelTiming(
        "tiled", f"{model} {name}, {rows} rows", us, 2.0 * n * k, library_us=library_us
    )


def beside_library(
    ours: Callable[[Tensor, Tensor], object], x: Tensor, weights: list[Tensor]
) -> tuple[float, float]:
    us, library_us = (
        time_graph([partial(by, x, weight) for weight in weights]) for by in (ours, F.linear)
    )
    return us, library_us


def pointwise() -> Iterator[KernelTiming]:
    hidden, ffn = 1024, 3072
    weight, head_weight = randn(hidden), randn(HEAD_DIM)
    angles = torch.randn(4096, HEAD_DIM, device="cuda")
    for tokens in (1, 8, 256, 8192):
        copies = range(rotation(8.0 * tokens * hidden))
        xs, wide = [randn(tokens, hidden) for _ in copies], randn(tokens, 2 * ffn)
        residual, inner = randn(tokens, hidden), randn(tokens, ffn)
        width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        qkv = randn(tokens, width)
        [(k, v)], _ = caches(1, tokens + BLOCK_SIZE, 1)
        slots = torch.randperm(tokens, device="cuda") + BLOCK_SIZE
        positions = torch.randint(0, 4096, (tokens,), device="cuda")
        rope = (qkv, positions, angles, k, v, slots, head_weight, head_weight, EPS)
        calls: dict[str, tuple[float, list[Callable[[], object]]]] = {
            "rms_norm": (
                4.0 * tokens * hidden,
                [partial(rms_norm, x, weight, EPS) for x in xs],
            ),
            "add_rms_norm": (
                8.0 * tokens * hidden,
                [partial(add_rms_norm, x, residual, weight, EPS) for x in xs],
            ),
            "attention_gate": (6.0 * tokens * ffn, [partial(gate.gated, inner, wide[:, ffn:])] * 8),
            "silu_and_mul": (6.0 * tokens * ffn, [partial(silu_and_mul, wide)] * 8),
            "norm_rope_write_kv": (4.0 * tokens * width, [partial(norm_rope_write_kv, *rope)] * 8),
        }
        for name, (num_bytes, launches) in calls.items():
            yield KernelTiming(name, f"{tokens} tokens", time_graph(launches), num_bytes=num_bytes)


def sampling() -> Iterator[KernelTiming]:
    """From logits of Qwen3's vocabulary to tokens; the least is to read the logits once.

    They spread as a model's do. With flatter ones, a filter keeps more tokens than listed.
    """
    vocab_size = 151_936
    kinds = {"greedy": (0.0, 1.0, 0), "gumbel": (1.0, 1.0, 0), "top-p": (1.0, 0.9, 0)}
    kinds["top-k"] = (1.0, 1.0, 50)
    for rows in (1, 32, 256):
        logits = [randn(rows, vocab_size).mul_(5) for _ in range(rotation(2.0 * rows * vocab_size))]
        slots = torch.arange(rows, dtype=torch.int32, device="cuda")
        for kind, (temperature, top_p, top_k) in kinds.items():
            into = sampling_slots(rows, temperature, top_p, top_k, len(logits))

            def draw(
                x: Tensor, slots: Tensor = slots, into: Tokens = into, kind: str = kind
            ) -> None:
                found = find_candidates(x, slots, into.slot_state)
                if kind.startswith("top"):
                    draw_filtered(x, found, slots, into.slot_state)
                choose(found[None], slots, into)

            us = time_graph([partial(draw, x) for x in logits])
            yield KernelTiming("sample", f"{rows} rows, {kind}", us, 2.0 * rows * vocab_size)


def sampling_slots(
    rows: int, temperature: float, top_p: float, top_k: int, num_tokens: int
) -> Tokens:
    """Slots with equal sampling parameters, and room for the tokens of all calls."""
    state = torch.zeros((rows, NUM_FIELDS.value), dtype=torch.int64)
    state[:, SEED.value] = torch.arange(rows)
    state[:, TOP_K.value] = top_k
    for field, value in ((TEMPERATURE, temperature), (TOP_P, top_p)):
        state[:, field.value] = torch.tensor(value).view(torch.int32).long()
    length = 32 * num_tokens
    token_rows = torch.zeros((rows, length), dtype=torch.int32, device="cuda")
    num_steps = torch.zeros(1, dtype=torch.int32, device="cuda")
    return Tokens(state.cuda(), token_rows, num_steps, output_ring(rows, token_rows.device))


def recurrent() -> Iterator[KernelTiming]:
    """A layer's states, each read and written once, and what goes in and out of each token.

    The layers are those of Qwen3.5-9B, Nemotron-3-Nano-30B and LFM2.5-1.2B.
    """
    for sequences, length in RECURRENT:
        tokens, shape = sequences * length, f"{sequences} x {length}"
        numbers, steps = torch.rand(3, 64, device="cuda"), randn(tokens, 64)
        delta = DeltaHeads(16, 32, 128, 128, -numbers[0, :32], numbers[1, :32])
        call: Callable[..., object] = partial(update_delta_net, randn(tokens, 8192), steps, delta)
        size = tokens * (2.0 * 8192 + 4.0 * 4096)
        yield _updates("delta_net", call, size, sequences, length, (32, 128, 128), torch.float32)
        scan = ScanHeads(64, 64, 8, 128, HeadParameters(-numbers[0], numbers[1]), numbers[2])
        call = partial(update_mamba2, randn(tokens, 6144), steps, scan)
        size = tokens * 2.0 * (6144 + 4096)
        yield _updates("mamba2", call, size, sequences, length, (64, 64, 128), torch.float32)
        for name, width, channels, gated in (
            ("convolve", 4, 8192, False),
            ("gated", 3, 2048, True),
        ):
            x = randn(tokens, channels * (3 if gated else 1))
            call = partial(convolve, x, randn(channels, width), None, gated=gated)
            size = 2.0 * (x.numel() + tokens * channels)
            row = channels, width - 1
            yield _updates(name, call, size, sequences, length, row, torch.bfloat16)
        y, wide, weight = randn(tokens, 4096).float(), randn(tokens, 12288), randn(128)
        norm = partial(gated_rms_norm, y, wide[:, 8192:], weight, 32, EPS, gate_first=False)
        yield KernelTiming("gated_norm", shape, time_graph([norm] * 8), 8.0 * tokens * 4096)


def _updates(
    name: str,
    update: Callable[..., object],
    num_bytes: float,
    sequences: int,
    length: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> KernelTiming:
    """Updates of states of this shape; `num_bytes` are those of all tokens, without states."""
    before, after = torch.randperm(2 * sequences, device="cuda").chunk(2)
    is_first = torch.zeros(sequences, dtype=torch.bool, device="cuda")
    bounds = None
    if length > 1:
        ends = torch.arange(sequences + 1, dtype=torch.int32, device="cuda") * length
        bounds = Bounds.of(ends[:-1], ends[1:], sequences * length)
    waves = [Segments(before, after, is_first, bounds)]
    of_states = 2.0 * sequences * math.prod(shape) * dtype.itemsize
    memories = [
        torch.zeros((2 * sequences, *shape), device="cuda", dtype=dtype)
        for _ in range(rotation(of_states))
    ]
    us = time_graph([partial(update, states=states, waves=waves) for states in memories])
    return KernelTiming(name, f"{sequences} x {length}", us, num_bytes + of_states)


def experts() -> Iterator[KernelTiming]:
    """Both products of a layer's experts, by the kernels that a worker takes for so many rows.

    Bytes are those of the experts that some row has, without scales; each layer's rows have others.
    """
    for name, bits, group in EXPERT_FORMATS:
        num_experts, hidden, inner, per_row = EXPERTS[name]
        layers = [
            _fused_experts(
                _expert_weights(num_experts, 2 * inner, hidden, bits, group),
                _expert_weights(num_experts, hidden, inner, bits, group),
                per_row,
            )
            for _ in range(4)
        ]
        for rows in EXPERT_ROWS:
            x, chosen = randn(rows, hidden), 0
            calls: list[Callable[[], object]] = []
            for layer in layers:
                _, routing = route(randn(rows, hidden), layer.router, None, EPS)
                calls.append(partial(layer.products, x, routing, x))
                chosen += int((routing.counts > 0).sum())
            num_bytes = chosen / len(layers) * 3 * hidden * inner * bits / 8
            shape = f"{name}, {bits} bits, {rows} rows"
            yield KernelTiming("experts", shape, time_graph(calls), num_bytes)


def _expert_weights(
    num_experts: int, num_outputs: int, width: int, bits: int, group: int | None
) -> ExpertWeights:
    """Random numbers, or bytes that are numbers with random scales."""
    shape = (num_experts, num_outputs, width)
    if bits == 16:
        return ExpertWeights(randn(*shape))
    of_scales = (num_experts, num_outputs, width // (group or width))
    if bits == 4:
        codes = torch.randint(256, (*shape[:2], width // 2), dtype=torch.uint8, device="cuda")
        exponents = torch.randint(110, 122, of_scales, dtype=torch.uint8, device="cuda")
        return ExpertWeights.of_codes(codes, exponents)
    values = torch.randint(0x60, shape, dtype=torch.uint8, device="cuda")
    scales = torch.rand(of_scales, device="cuda")
    return ExpertWeights(values.view(torch.float8_e4m3fn), scales, group)


def _fused_experts(gate_up: ExpertWeights, down: ExpertWeights, per_row: int) -> FusedExperts:
    num_experts, _, hidden = gate_up.shape
    router = Router(randn(num_experts, hidden) * hidden**-0.5, per_row, True)
    few = FewRowExperts.of(gate_up, down, per_row)
    return FusedExperts(randn(hidden), router, gate_up, down, few=few)


GROUPS: dict[str, Callable[[], Iterator[KernelTiming]]] = {
    "decode": decode_attention,
    "decode_float8": decode_float8,
    "prefill": prefill_attention,
    "latents": latents,
    "linear": small_linear,
    "tiled": tiled_layers,
    "pointwise": pointwise,
    "sample": sampling,
    "recurrent": recurrent,
    "experts": experts,
}


def main(arguments: Sequence[str]) -> int:
    """Times the ceilings, then the selected kernels."""
    parser = new_parser("bench.kernels", __doc__)
    add, every = parser.add_argument, list(GROUPS)
    add("--only", choices=GROUPS, nargs="+", default=every, help="groups (default: all)")
    add_json(parser)
    options = parser.parse_args(arguments)
    results = Results(options.json, ["python", "-m", "bench.kernels", *arguments])
    if not torch.cuda.is_available():
        sys.exit("bench.kernels needs a CUDA device")
    torch.manual_seed(0)
    copy, matmul = ceilings()
    best_bytes, best_flops = copy.num_bytes / copy.us, matmul.flops / matmul.us
    chosen = (timing for name in options.only for timing in GROUPS[name]())
    for timing in (copy, matmul, *chosen):
        share = timing.flops / timing.us / best_flops or timing.num_bytes / timing.us / best_bytes
        results.add("kernels", asdict(timing) | {"share_of_ceiling": round(share, 4)})
        library = f"  library {timing.library_us:8.2f} us" if timing.library_us else ""
        line = f"{timing.kernel:20}{timing.shape:36}{timing.us:9.2f} us  {timing.rate()}"
        results.say(f"{line} {share:6.1%} of the ceiling{library}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
