"""Models with integer weights against the same models with the float numbers they stand for."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.quantized.grouped import GroupedWeight
from worker_svc.attention.batch import AttentionBatch
from worker_svc.models.decoder import Decoder
from worker_svc.models.linear import Linear, WeightRows
from worker_svc.models.rope import RotaryConfig
from worker_svc.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from worker_svc.models.stored.weight_files import MissingWeight
from worker_svc.models.weights import Filling, Share, UnexpectedWeight, WrongShape

CPU = torch.device("cpu")
LAYER = LayerSpec(AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, rope="rope"), MlpSpec(96))
MODEL = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=70,
    hidden_size=64,
    layers=(LAYER, LAYER),
    ropes={"rope": RotaryConfig(10_000.0)},
    rms_norm_eps=1e-5,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)


def drawn(shape: tuple[int, int], bits: int = 4, group: int = 32, seed: int = 0) -> GroupedWeight:
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(0, 2**bits, shape, generator=generator, dtype=torch.uint8)
    scales = torch.rand((shape[0], shape[1] // group), generator=generator) / 2**bits / 2
    return GroupedWeight(integers, scales, -scales * 2 ** (bits - 1), bits)


def test_the_parts_of_a_fused_layer_become_one_weight_in_any_order() -> None:
    linear = Linear.empty(64, 24, bias=False, dtype=torch.float32, device=CPU)
    first, second = drawn((16, 64), 4), drawn((8, 64), 8, 16, seed=1)
    linear.rows(16, 24).put_narrow(second)
    assert linear.grouped is None
    linear.rows(0, 16).put_narrow(first)
    assert linear.grouped is not None
    expected = torch.cat((first.dequantized(), second.dequantized()))
    assert torch.equal(linear.grouped.dequantized(), expected)
    x = torch.randn(3, 64)
    linear.pack()
    torch.testing.assert_close(linear(x), F.linear(x, expected))


@pytest.mark.parametrize("floats_first", [False, True])
def test_integers_beside_float_numbers_become_float_numbers(floats_first: bool) -> None:
    linear = Linear.empty(64, 24, bias=False, dtype=torch.float32, device=CPU)
    integers, floats = drawn((16, 64)), torch.randn(8, 64)
    if floats_first:
        linear.rows(16, 24).copy_(floats)
    linear.rows(0, 16).put_narrow(integers)
    if not floats_first:
        linear.rows(16, 24).copy_(floats)
    assert linear.grouped is None
    assert torch.equal(linear.weight, torch.cat((integers.dequantized(), floats)))


def test_a_destination_is_filled_once_with_its_own_shape() -> None:
    linear = Linear.empty(64, 24, bias=False, dtype=torch.float32, device=CPU)
    filling = Filling({"a": linear.rows(0, 24), "b": torch.empty(24, 64)})
    with pytest.raises(UnexpectedWeight, match="c: the model has no such"):
        filling.claim("c", (24, 64))
    filling.claim("b", (24, 64))
    with pytest.raises(UnexpectedWeight, match="b: found twice"):
        filling.claim("b", (24, 64))
    with pytest.raises(MissingWeight, match="a not found in file"):
        filling.finish(Path("file"))
    with pytest.raises(WrongShape, match=r"a: has shape \(24, 32\), expected \(24, 64\)"):
        filling.claim("a", (24, 32))


@pytest.mark.parametrize("dim", [0, 1])
def test_a_rank_keeps_its_share_of_a_whole_weight(dim: int) -> None:
    whole, parts = drawn((24, 64)), []
    for index in range(2):
        shape = (12, 64) if dim == 0 else (24, 32)
        linear = Linear.empty(shape[1], shape[0], bias=False, dtype=torch.float32, device=CPU)
        rows = {"a": linear.rows(0, shape[0])}
        filling = Filling(rows, share=lambda _, index=index: Share(dim, index, 2))  # type: ignore[misc]
        _, share = filling.claim("a", whole.shape)
        assert share is not None
        rows["a"].put_narrow(share.cut_groups(whole))
        parts.append(linear.weight)
    assert torch.equal(torch.cat(parts, dim), whole.dequantized())


def test_a_share_that_cuts_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match="columns 0 to 32 cut groups of 64"):
        Share(1, 0, 2).cut_groups(drawn((24, 64), group=64))


def filled(spec: ModelSpec, *, integers: bool) -> Decoder:
    """A model with drawn weights; as integers, or as their float numbers."""
    model = Decoder(spec, torch.float32, CPU, 64)
    for seed, (name, rows) in enumerate(model.destinations()):
        if isinstance(rows, WeightRows):
            shape = (rows.shape[0], rows.shape[1])
            weight = drawn(shape, 8 if "v_proj" in name or "embed" in name else 4, seed=seed)
            if integers:
                rows.put_narrow(weight)
            else:
                rows.copy_(weight.dequantized())
        else:
            rows.copy_(torch.linspace(0.5, 1.5, rows.shape[0]))
    model.pack()
    return model


def logits(model: Decoder, token_ids: Tensor) -> Tensor:
    """Logits [T, vocab] after each token of one sequence."""
    count = len(token_ids)
    cache = model.new_cache(8, 16)
    batch = AttentionBatch(
        slot_mapping=torch.arange(16, 16 + count),
        block_tables=torch.arange(1, 8, dtype=torch.int32)[None],
        context_lens=torch.tensor([count], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32),
        max_seqlen_q=count,
        max_context_len=count,
    )
    return model.logits(model.forward(token_ids, torch.arange(count), cache, batch))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kernels", ["0", "1"])
def test_a_model_of_integers_equals_the_model_of_their_float_numbers(
    monkeypatch: pytest.MonkeyPatch, kernels: str, tied: bool
) -> None:
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", kernels)
    spec = replace(MODEL, tie_word_embeddings=tied)
    found, twin = (filled(spec, integers=integers) for integers in (True, False))
    token_ids = torch.arange(40) % 37
    ours, theirs = logits(found, token_ids), logits(twin, token_ids)
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
    assert torch.equal(ours.argmax(1), theirs.argmax(1))
