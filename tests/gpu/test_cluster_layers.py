"""Layers of one row by clusters of thread blocks equal the same layers in float32."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.cluster.decode_layer import (
    DecodedRow,
    DecodeLayer,
    LayerShape,
    LayerTiling,
    ResidualStream,
    why_unsuitable,
)
from worker_svc.models.rope import RotaryConfig, cos_sin_table

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="no CUDA device of compute capability 9",
    ),
]

EPS = 1e-6
BLOCK_SIZE = 16
NUM_LAYERS = 3
LONGEST = 5000
SHAPES = {
    "qwen3-0.6b": LayerShape(1024, 3072, 16, 8, 128, has_qk_norm=True),
    "smollm2-135m": LayerShape(576, 1536, 9, 3, 64, has_qk_norm=False),
    "one KV head": LayerShape(512, 1024, 4, 1, 128, has_qk_norm=True),
}
# Padding, one token, edges of blocks of 16, of tiles of 8 and of what a block of threads takes.
CONTEXTS = (0, 1, 2, 8, 9, 16, 17, 63, 64, 65, 576, 577, 1024, 1025, LONGEST)


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of one layer."""

    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    norms: tuple[Tensor, Tensor]
    qk_norms: tuple[Tensor, Tensor] | None


class Model:
    """Random layers, a paged cache whose blocks lie in any order, and both ways to run them."""

    def __init__(self, shape: LayerShape, seed: int) -> None:
        assert why_unsuitable(shape, LayerTiling()) == ""
        self.shape = shape
        self.random = torch.Generator("cuda").manual_seed(seed)
        self.kernels = DecodeLayer(shape, LayerTiling(), EPS, shape.head_dim**-0.5)
        self.layers = [self._layer() for _ in range(NUM_LAYERS)]
        self.final_norm = 1 + self.normal(shape.hidden, std=0.1)
        num_blocks = LONGEST // BLOCK_SIZE + 2
        size = (num_blocks, BLOCK_SIZE, 2, shape.num_kv_heads, shape.head_dim)
        self.caches = [self.normal(*size, std=1.0) for _ in range(NUM_LAYERS)]
        order = torch.randperm(num_blocks, generator=self.random, device="cuda")
        self.table = order.int()[None]
        rope = RotaryConfig(theta=1e6, scaling=None)
        self.cos_sin = cos_sin_table(rope, shape.head_dim, LONGEST + 1).cuda()

    def normal(self, *size: int, std: float) -> Tensor:
        values = torch.randn(*size, generator=self.random, device="cuda") * std
        return values.bfloat16()

    def _layer(self) -> Weights:
        shape = self.shape
        q = shape.num_heads * shape.head_dim
        kv = shape.num_kv_heads * shape.head_dim
        wide = shape.hidden**-0.5

        def norm(size: int) -> Tensor:
            return 1 + self.normal(size, std=0.1)

        return Weights(
            qkv=self.normal(q + 2 * kv, shape.hidden, std=wide),
            o=self.normal(shape.hidden, q, std=q**-0.5),
            gate_up=self.normal(2 * shape.intermediate, shape.hidden, std=wide),
            down=self.normal(shape.hidden, shape.intermediate, std=shape.intermediate**-0.5),
            norms=(norm(shape.hidden), norm(shape.hidden)),
            qk_norms=(norm(shape.head_dim), norm(shape.head_dim)) if shape.has_qk_norm else None,
        )

    def slot(self, context: int) -> int:
        """The slot of the newest token's keys; -1 for padding."""
        if not context:
            return -1
        block = int(self.table[0, (context - 1) // BLOCK_SIZE])
        return block * BLOCK_SIZE + (context - 1) % BLOCK_SIZE

    def by_clusters(self, x: Tensor, context: int) -> Tensor:
        """Normed hidden state [1, N] of a row whose context this is; fills the caches."""

        def number(value: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor([value], dtype=dtype, device="cuda")

        row = DecodedRow(
            number(max(context - 1, 0)),
            number(self.slot(context)),
            self.table,
            number(context, torch.int32),
        )
        residuals = [torch.full_like(x, float("nan")) for _ in range(2)]
        partials = [
            torch.full((count, self.shape.hidden), float("nan"), device="cuda")
            for count in (self.shape.num_kv_heads, self.kernels.tiling.mlp_clusters)
        ]
        stream = ResidualStream(x, partials[1], 0)
        for layer, cache in zip(self.layers, self.caches, strict=True):
            kv = cache[:, :, 0], cache[:, :, 1]
            stream = self.kernels.attend(
                stream, residuals[0], partials[0], layer.norms[0], layer.qkv, layer.qk_norms,
                layer.o, self.cos_sin, row, kv,
            )  # fmt: skip
            stream = self.kernels.feed_forward(
                stream, residuals[1], partials[1], layer.norms[1], layer.gate_up, layer.down
            )
        return self.kernels.normed(stream, self.final_norm, torch.empty_like(x))

    def expected(self, x: Tensor, context: int) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The same in float32 without rounding, and each layer's new keys and values."""
        shape, residual, new = self.shape, x.float(), []
        heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        tokens = torch.arange(max(context - 1, 0), device="cuda")
        places = (self.table[0, tokens // BLOCK_SIZE].long(), tokens % BLOCK_SIZE)
        cosines, sines = self.cos_sin[max(context - 1, 0)].chunk(2)
        for layer, cache in zip(self.layers, self.caches, strict=True):
            normed = reference.rms_norm(residual, layer.norms[0].float(), EPS)
            qkv = (normed @ layer.qkv.float().T).view(-1, shape.head_dim)
            q, k, v = qkv.split(heads)
            if layer.qk_norms is not None:
                q = reference.rms_norm(q, layer.qk_norms[0].float(), EPS)
                k = reference.rms_norm(k, layer.qk_norms[1].float(), EPS)
            q, k = _rotated(q, cosines, sines), _rotated(k, cosines, sines)
            new.append((k, v))
            old = cache[places].float()
            keys = torch.cat((old[:, 0], k[None]))
            values = torch.cat((old[:, 1], v[None]))
            group = shape.num_heads // shape.num_kv_heads
            attended = torch.zeros_like(q)
            if context:
                scores = torch.einsum("hd,thd->ht", q, keys.repeat_interleave(group, 1))
                weights = (scores * shape.head_dim**-0.5).softmax(-1)
                attended = torch.einsum("ht,thd->hd", weights, values.repeat_interleave(group, 1))
            residual = residual + attended.reshape(1, -1) @ layer.o.float().T
            normed = reference.rms_norm(residual, layer.norms[1].float(), EPS)
            inner = reference.silu_and_mul(normed @ layer.gate_up.float().T)
            residual = residual + inner @ layer.down.float().T
        return reference.rms_norm(residual, self.final_norm.float(), EPS), new


def _rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat((low * cosines - high * sines, high * cosines + low * sines), -1)


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    yield Model(SHAPES[request.param], seed=len(request.param))


@pytest.mark.parametrize("context", CONTEXTS)
def test_layers_equal_float32(model: Model, context: int) -> None:
    x = model.normal(1, model.shape.hidden, std=1.0)
    before = [cache.clone() for cache in model.caches]
    expected, new = model.expected(x, context)
    found = model.by_clusters(x, context).float()
    assert found.isfinite().all()
    assert (found - expected).norm() / expected.norm() < 2e-2
    for cache, old, (k, v) in zip(model.caches, before, new, strict=True):
        changed = (cache != old).flatten(2).any(-1).flatten().nonzero().flatten().tolist()
        if not context:
            assert changed == []  # padding stores nothing
            continue
        assert set(changed) <= {model.slot(context)}  # and a row its own slot alone
        stored = cache.flatten(0, 1)[model.slot(context)].float()
        torch.testing.assert_close(stored[0], k, atol=0.1, rtol=0.05)
        torch.testing.assert_close(stored[1], v, atol=0.1, rtol=0.05)


def test_the_same_row_gives_the_same_bits_whatever_else_the_cache_holds(model: Model) -> None:
    x = model.normal(1, model.shape.hidden, std=1.0)
    first = model.by_clusters(x, 577)
    later = torch.arange(577 // BLOCK_SIZE + 1, model.table.shape[1], device="cuda")
    for cache in model.caches:
        cache[model.table[0, later].long()] = float("nan")  # of other sequences
    again = [model.by_clusters(x, 577) for _ in range(20)]
    for cache in model.caches:
        cache.nan_to_num_()
    assert all(torch.equal(first, each) for each in again)


def test_the_newest_token_is_attended_to_before_it_is_in_the_cache(model: Model) -> None:
    x = model.normal(1, model.shape.hidden, std=1.0)
    once = model.by_clusters(x, 100)
    assert torch.equal(once, model.by_clusters(x, 100))  # its keys are there by now
