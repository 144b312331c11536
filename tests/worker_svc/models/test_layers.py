"""Layers use the checkpoint's weight names and never modify their inputs."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from worker_svc.models.layers import MLP, Attention, Destinations, RMSNorm
from worker_svc.models.linear import WeightRows
from worker_svc.models.spec import AttentionSpec, MlpSpec

CPU = torch.device("cpu")
HIDDEN = 12
ATTENTION = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=6, rope="rope")


def test_float32_inputs_of_a_norm_survive_it() -> None:
    norm = RMSNorm(4, 1e-5, torch.float32, CPU)
    norm.weight.fill_(2.0)
    residual, x = torch.tensor([[2.0, 3, 4, 5]]), torch.ones(1, 4)
    alone = norm(residual)
    normed, total = norm.add(x, residual)
    assert residual.tolist() == [[2, 3, 4, 5]]
    assert x.tolist() == [[1, 1, 1, 1]]
    assert total.tolist() == [[3, 4, 5, 6]]
    root = (torch.tensor([4.0 + 9 + 16 + 25]) / 4 + 1e-5).sqrt()
    torch.testing.assert_close(alone, residual / root * 2)
    torch.testing.assert_close(normed, norm(total))


def floats(destinations: Destinations) -> dict[str, torch.Tensor]:
    """The views that tensors of a checkpoint fill."""
    return {
        name: part.values if isinstance(part, WeightRows) else part  # type: ignore[misc]
        for name, part in destinations
    }


@pytest.mark.parametrize("mlp_bias", [False, True])
def test_the_mlp_gates_up_with_silu(mlp_bias: bool) -> None:
    torch.manual_seed(0)
    mlp = MLP(HIDDEN, MlpSpec(20, mlp_bias), torch.float32, CPU)
    parts = floats(mlp.destinations("mlp"))
    for part in parts.values():
        part.normal_()
    copies = {name.removeprefix("mlp."): part.clone() for name, part in parts.items()}
    x = torch.randn(5, 12)

    def product(name: str, inputs: torch.Tensor) -> torch.Tensor:
        return F.linear(inputs, copies[f"{name}.weight"], copies.get(f"{name}.bias"))

    mlp.pack()
    expected = product("down_proj", F.silu(product("gate_proj", x)) * product("up_proj", x))
    torch.testing.assert_close(mlp(x), expected, atol=1e-4, rtol=1e-5)


def attention_of(spec: AttentionSpec) -> Attention:
    return Attention(HIDDEN, spec, 1e-5, torch.float32, CPU)


@pytest.mark.parametrize(
    ("changes", "extra"),
    [
        ({}, set()),
        ({"qkv_bias": True}, {"q_proj.bias", "k_proj.bias", "v_proj.bias"}),
        ({"o_bias": True}, {"o_proj.bias"}),
        ({"qk_norm": True}, {"q_norm.weight", "k_norm.weight"}),
    ],
)
def test_attention_asks_for_exactly_its_familys_tensors(
    changes: dict[str, bool], extra: set[str]
) -> None:
    attention = attention_of(replace(ATTENTION, **changes))
    shapes = {name: tuple(part.shape) for name, part in attention.destinations("a")}
    plain = {"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"}
    assert set(shapes) == {f"a.{name}" for name in plain | extra}
    assert shapes["a.q_proj.weight"] == (24, 12)
    assert shapes["a.k_proj.weight"] == shapes["a.v_proj.weight"] == (12, 12)
    assert shapes["a.o_proj.weight"] == (12, 24)
    assert shapes.get("a.q_norm.weight", (6,)) == (6,)


def test_the_parts_of_a_fused_product_do_not_overlap() -> None:
    attention = attention_of(ATTENTION)
    parts = floats(attention.destinations("a"))
    for number, part in enumerate(parts.values()):
        part.fill_(number)
    assert [part.unique().tolist() for part in parts.values()] == [[0], [1], [2], [3]]
