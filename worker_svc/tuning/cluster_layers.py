"""Decides whether decode steps of one row run by clusters of thread blocks.

Where the model's shape, its type and the device suit, both implementations run the same rows. The
clusters are taken if their results match those of the other kernels and their time is shorter.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.cluster.decode_layer import DecodeLayer, LayerShape, LayerTiling, why_unsuitable
from kernels.cluster.program import CannotCompile
from worker_svc.attention.batch import AttentionBatch, HeadLayout
from worker_svc.attention.kv_cache import KVCache
from worker_svc.config import kernel_cache
from worker_svc.device.capture_stream import captured, capturing
from worker_svc.models.cluster_layers import ClusterLayers
from worker_svc.models.fused import FusedDecoder
from worker_svc.models.spec import ModelSpec
from worker_svc.protocol.step import Limits
from worker_svc.tuning.attention import WORTHWHILE
from worker_svc.tuning.stopwatch import least_us, vote

log = logging.getLogger(__name__)

CONTEXT = 576
REPLAYS = 8
# Of a hidden state after two layers: bfloat16 rounds a dozen times on the way.
TOLERANCE = 2e-2


def choose(
    fused: FusedDecoder,
    spec: ModelSpec,
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype],
    limits: Limits,
) -> None:
    """Sets the model's layers for one row; must be called before a graph is captured.

    `dtypes` are those of the model and of the KV cache.
    """
    reason = _why_not(fused, spec, device, *dtypes) or _try(fused, spec, device, limits)
    log.info("layers of one row by clusters: %s", reason or "used")


def _why_not(
    fused: FusedDecoder,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> str:
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return "they are for compute capability 9"
    if dtype != torch.bfloat16:
        return f"they are for bfloat16, this is {dtype}"
    if kv_dtype != dtype:
        return f"they are for a KV cache of the model's type, this is {kv_dtype}"
    if fused.has_biases or fused.is_sharded:
        return "they are for one device and linear layers without biases"
    if len(fused.kinds) > 1 or not fused.kinds[0].is_plain:
        return f"they are for full attention, this is {' and '.join(map(str, fused.kinds))}"
    if not fused.is_usual:
        return "they norm heads apart, add outputs as they are, and are for one MLP with SiLU"
    if spec.rotates_in_part:
        return "they rotate all dimensions of a head"
    if not fused.has_plain_weights:
        return "they are for weights that are not quantized"
    return why_unsuitable(_shape(spec), LayerTiling())


def _shape(spec: ModelSpec) -> LayerShape:
    attention = spec.attention
    return LayerShape(
        hidden=spec.hidden_size,
        intermediate=spec.uniform_feed.intermediate_size,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        has_qk_norm=attention.qk_norm,
    )


@torch.inference_mode()
def _try(fused: FusedDecoder, spec: ModelSpec, device: torch.device, limits: Limits) -> str:
    """Why they are not taken; empty if they are."""
    heads = spec.attention.heads
    try:
        eps, scale, kept = spec.rms_norm_eps, fused.kinds[0].scale, kernel_cache() / "cluster"
        kernels = DecodeLayer(_shape(spec), LayerTiling(), eps, scale, kept)
        if not kernels.overlaps():
            return "this device does not run the clusters of two launches at once"
        candidate = fused.cluster_layers(kernels)
        trial = _Trial(fused, heads, spec.num_layers, device, limits)
        for context in trial.contexts():
            error = trial.error(candidate, context)
            if not error <= TOLERANCE:  # or NaN, which a maximum may pass over
                return f"their results differ by {error:.3f} at a context of {context}"
        us = trial.times_us(candidate)
    except (CannotCompile, RuntimeError) as error_of_device:
        return str(error_of_device)
    if not vote(us, WORTHWHILE):
        return f"{us[1]:.0f} us for all layers, the other kernels take {us[0]:.0f}"
    log.info("all layers of one row: %.0f us in place of %.0f", us[1], us[0])
    fused.one_row = candidate
    return ""


class _Trial:
    """Runs one row over a small cache of its own."""

    def __init__(
        self,
        fused: FusedDecoder,
        heads: HeadLayout,
        num_layers: int,
        device: torch.device,
        limits: Limits,
    ) -> None:
        self._fused = fused
        self._limits = limits
        self._context = min(CONTEXT, limits.max_model_len)
        num_blocks = -(-self._context // limits.block_size)
        self._cache = KVCache(
            num_layers, num_blocks, limits.block_size, heads.num_kv_heads, heads.head_dim,
            torch.bfloat16, device,
        )  # fmt: skip
        random = torch.Generator(device).manual_seed(0)
        for layer in range(num_layers):
            self._cache.rows(layer).normal_(generator=random)
        # As wide as the tables of steps, whose kernels are compiled for that stride.
        table = torch.zeros((1, limits.max_blocks_per_seq), dtype=torch.int32, device=device)
        self._table = table[:, :num_blocks]
        self._table[0] = torch.randperm(num_blocks, generator=random, device=device)
        self._token = torch.zeros(1, dtype=torch.int64, device=device)

    def contexts(self) -> list[int]:
        """Lengths to compare at: padding, one token, block edges, a long one."""
        block, longest = self._limits.block_size, self._context
        return [min(n, longest) for n in (0, 1, block, block + 1, longest - 1, longest)]

    def error(self, candidate: ClusterLayers, context: int) -> float:
        """The relative difference of the two hidden states after two layers."""
        short = self._fused.shortened(2)
        expected = self._run(short, None, context).float()
        found = self._run(short, candidate.shortened(2), context).float()
        return float((found - expected).norm() / expected.norm())

    def times_us(self, candidate: ClusterLayers) -> list[float]:
        """All layers by the other kernels, then by clusters: one of several replays."""
        with capturing(self._token.device):
            graphs = [captured(self._work(layers)) for layers in (None, candidate)]
            replays = [self._replays(graph) for graph in graphs]
            return [us / REPLAYS for us in least_us(replays, waits=True)]

    def _work(self, layers: ClusterLayers | None) -> Callable[[], None]:
        inputs = self._inputs(self._context)

        def work() -> None:
            self._forward(self._fused, layers, *inputs)

        work()  # compiles, outside of the capture
        return work

    @staticmethod
    def _replays(graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
        def replay() -> None:
            for _ in range(REPLAYS):
                graph.replay()

        return replay

    def _run(self, fused: FusedDecoder, layers: ClusterLayers | None, context: int) -> Tensor:
        return self._forward(fused, layers, *self._inputs(context))

    def _forward(
        self,
        fused: FusedDecoder,
        layers: ClusterLayers | None,
        positions: Tensor,
        batch: AttentionBatch,
    ) -> Tensor:
        return fused.with_one_row(layers).forward(self._token, positions, self._cache, batch)

    def _inputs(self, context: int) -> tuple[Tensor, AttentionBatch]:
        """Position and batch of a row whose context this is; 0: a row of padding."""
        last, block_size = max(context - 1, 0), self._limits.block_size
        positions = torch.full_like(self._token, last)
        slot = self._table[0, last // block_size].long()[None] * block_size + last % block_size
        slots = slot if context else torch.full_like(slot, -1)
        lengths = torch.full((1,), context, dtype=torch.int32, device=positions.device)
        batch = AttentionBatch.of_decodes(slots, self._table, lengths, self._limits.max_model_len)
        return positions, batch
