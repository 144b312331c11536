"""Families with experts: what their config.json says, and what is refused of them by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.worker_svc.models.configs import LLAMA, read, windows
from tests.worker_svc.models.test_models import (
    CHECKPOINTS,
    MAX_MODEL_LEN,
    SHAPE,
    Steps,
    make_prompts,
    save,
)
from tests.worker_svc.quantized_checkpoints import FORMATS, gptq, save_quantized
from tests.worker_svc.random_models import save_random_model
from tests.worker_svc.transformers_models.families import write
from worker_svc.models import config as model_config
from worker_svc.models import load_model
from worker_svc.models.spec import (
    MlpSpec,
    ModelSpec,
    MoeSpec,
    RouterSpec,
    SharedSpec,
    UnsupportedModel,
)
from worker_svc.models.weights import MissingWeight

CPU = torch.device("cpu")
TWO_FORMS = "fp8-channel", "fp8-block"


def sparse(spec: ModelSpec) -> list[bool]:
    """True for each layer with experts."""
    return [isinstance(layer.feed, MoeSpec) for layer in spec.layers]


def test_qwen3_has_its_experts_in_all_layers(tmp_path: Path) -> None:
    spec = read(tmp_path, "qwen3-30b-a3b")
    assert {layer.feed for layer in spec.layers} == {
        MoeSpec(RouterSpec(16, 4, renormalizes=True), 24)
    }
    assert spec.uniform.mixer.qk_norm


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"mlp_only_layers": [0, 2]}, [False, True, False, True]),
        ({"decoder_sparse_step": 2}, [False, True, False, True]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [False, True, False, False]),
        ({"mlp_only_layers": None, "decoder_sparse_step": ...}, [True] * 4),
    ],
)
def test_layers_without_experts_are_those_that_the_config_says(
    tmp_path: Path, changes: dict[str, Any], expected: list[bool]
) -> None:
    spec = read(tmp_path, "qwen3-30b-a3b", **changes)
    assert sparse(spec) == expected
    dense = {layer.feed for layer in spec.layers if isinstance(layer.feed, MlpSpec)}
    assert dense <= {MlpSpec(LLAMA["intermediate_size"])}


def test_mixtral_renormalizes_and_names_its_tensors(tmp_path: Path) -> None:
    spec = read(tmp_path, "mixtral-8x7b")
    feed = MoeSpec(RouterSpec(8, 2, renormalizes=True), LLAMA["intermediate_size"])
    assert {layer.feed for layer in spec.layers} == {feed}
    names = spec.names
    assert (names.mlp, names.expert_gate, names.expert_up) == ("block_sparse_moe", "w1", "w3")
    assert {"w1.weight": 0, "w2.weight": 1, "w3.weight": 0}.items() <= dict(names.divided).items()


def test_what_a_config_leaves_out_is_as_in_transformers(tmp_path: Path) -> None:
    left_out = dict.fromkeys(
        ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"), ...
    )
    feed = read(tmp_path, "qwen3-30b-a3b", **left_out).layers[0].feed
    assert feed == MoeSpec(RouterSpec(128, 8, renormalizes=False), 768)
    spec = read(
        tmp_path, "mixtral-8x7b", num_local_experts=..., num_experts_per_tok=..., rope_theta=...
    )
    assert spec.layers[0].feed == MoeSpec(
        RouterSpec(8, 2, renormalizes=True), LLAMA["intermediate_size"]
    )
    assert [rope.theta for rope in spec.ropes.values()] == [1e6]


def test_qwen2_has_an_expert_of_every_token(tmp_path: Path) -> None:
    feed = read(tmp_path, "qwen1.5-moe-a2.7b").layers[0].feed
    router = RouterSpec(6, 4, renormalizes=False)
    assert feed == MoeSpec(router, 12, SharedSpec(4, is_gated=True))
    assert read(tmp_path, "qwen1.5-moe-a2.7b").attention.qkv_bias
    assert not read(tmp_path, "qwen1.5-moe-a2.7b", qkv_bias=False).attention.qkv_bias
    with pytest.raises(UnsupportedModel, match=r"^shared_expert_intermediate_size: 20 is no mult"):
        read(tmp_path, "qwen1.5-moe-a2.7b", shared_expert_intermediate_size=20)
    read(tmp_path, "qwen1.5-moe-a2.7b")
    with pytest.raises(UnsupportedModel, match=r"^quantization: fp8 .* shared .* 4 times as wide"):
        model_config.load(tmp_path, quantization="fp8")
    read(tmp_path, "qwen1.5-moe-a2.7b", shared_expert_intermediate_size=12)
    assert model_config.load(tmp_path, quantization="fp8").quantization is not None
    with pytest.raises(UnsupportedModel, match=r"^quantization: int8 .* only 8-bit floats"):
        model_config.load(tmp_path, quantization="int8")


def test_windows_are_on_the_layers_that_each_class_gives_them(tmp_path: Path) -> None:
    qwen = {"use_sliding_window": True, "sliding_window": 64, "num_hidden_layers": 4}
    assert windows(read(tmp_path, "qwen1.5-moe-a2.7b", **qwen)) == [64, None, 64, None]
    few = windows(read(tmp_path, "qwen1.5-moe-a2.7b", **qwen, max_window_layers=2))
    assert few == [64, None, None, None]
    dots = {"sliding_window": 64, "max_window_layers": 2, "num_hidden_layers": 4}
    assert windows(read(tmp_path, "dots.llm1", **dots)) == [None, None, 64, 64]
    assert windows(read(tmp_path, "dots.llm1")) == [None] * 3
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    for name, changes in (("qwen1.5-moe-a2.7b", qwen), ("dots.llm1", dots)):
        found = windows(read(tmp_path, name, **changes, layer_types=kinds))
        assert found == [64, None, None, 64]


def test_dots1_chooses_by_sigmoids_after_its_first_layers(tmp_path: Path) -> None:
    spec = read(tmp_path, "dots.llm1")
    router = RouterSpec(8, 6, renormalizes=True, is_sigmoid=True, has_bias=True, scale=2.5)
    feed = MoeSpec(router, 12, SharedSpec(2, is_gated=False))
    assert sparse(spec) == [False] + [True] * (spec.num_layers - 1)
    assert {layer.feed for layer in spec.layers[1:]} == {feed}
    assert (spec.attention.qk_norm, spec.attention.qkv_bias) == (True, False)


def test_experts_have_8_bit_floats_or_plain_numbers(tmp_path: Path) -> None:
    read(tmp_path, "qwen3-30b-a3b")
    assert model_config.load(tmp_path, quantization="fp8").quantization is not None
    with pytest.raises(UnsupportedModel, match=r"^quantization: int4 .* Qwen3MoeForCausalLM"):
        model_config.load(tmp_path, quantization="int4")
    settings = gptq(group=32).config
    with pytest.raises(UnsupportedModel, match=r"^quantization: gptq.* Qwen3MoeForCausalLM"):
        read(tmp_path, "qwen3-30b-a3b", quantization_config=dict(settings))
    # Layers that keep one MLP may have any format.
    assert read(
        tmp_path, "qwen3-30b-a3b", quantization_config=dict(settings), mlp_only_layers=[*range(4)]
    )


@pytest.mark.parametrize("form", ["fp8-block", "fp8-channel"])
def test_a_checkpoint_in_8_bits_gives_the_logits_of_its_twin(tmp_path: Path, form: str) -> None:
    save(tmp_path / "plain", "qwen3-moe-mixed")
    save_quantized(tmp_path / "plain", tmp_path / "q", tmp_path / "twin", FORMATS[form])
    (prompt,) = make_prompts(20)
    found, expected = (
        Steps(load_model(tmp_path / name, torch.float32, CPU, MAX_MODEL_LEN), [prompt]).run({0: 20})
        for name in ("q", "twin")
    )
    torch.testing.assert_close(found[0], expected[0])


@pytest.mark.parametrize("name", ["glm4_moe", "qwen2-moe"])
def test_an_expert_of_every_token_has_8_bits_as_the_others(tmp_path: Path, name: str) -> None:
    """It is so in a checkpoint, or rounded at load; that of Qwen2 has a gate, which stays plain."""
    plain = tmp_path / "plain"
    if name == "glm4_moe":
        write(name, plain)
    else:
        family, sizes = CHECKPOINTS[name]
        as_wide = {"shared_expert_intermediate_size": sizes["moe_intermediate_size"]}
        save_random_model(plain, family, SHAPE | sizes | as_wide)
    (prompt,) = make_prompts(20)
    for form in TWO_FORMS:
        save_quantized(plain, tmp_path / form, tmp_path / f"{form}-twin", FORMATS[form])
    stored = load_file(tmp_path / "fp8-channel" / "model.safetensors")
    assert any("shared" in name and name.endswith("down_proj.weight_scale") for name in stored)
    twin, block_twin = (logits_of(tmp_path / f"{form}-twin", prompt) for form in TWO_FORMS)
    assert twin.abs().max() > 0.5 and not torch.allclose(twin, logits_of(plain, prompt))
    torch.testing.assert_close(logits_of(tmp_path / "fp8-channel", prompt), twin)
    torch.testing.assert_close(logits_of(plain, prompt, "fp8"), twin)
    torch.testing.assert_close(logits_of(tmp_path / "fp8-block", prompt), block_twin)


def logits_of(folder: Path, prompt: torch.Tensor, quantization: str = "auto") -> torch.Tensor:
    """The logits of a prompt by a model in float32."""
    model = load_model(folder, torch.float32, CPU, MAX_MODEL_LEN, quantization=quantization)
    return Steps(model, [prompt]).run({0: len(prompt)})[0]


def test_random_weights_are_rounded_where_the_option_says_so(tmp_path: Path) -> None:
    read(tmp_path, "qwen3-30b-a3b", mlp_only_layers=[0])
    plain, rounded = (
        load_model(tmp_path, torch.float32, CPU, 32, quantization=quantization, load_format="dummy")
        for quantization in ("auto", "fp8")
    )
    (prompt,) = make_prompts(9)
    prompt = prompt % plain.spec.vocab_size
    exact, near = (Steps(model, [prompt]).run({0: 9})[0] for model in (plain, rounded))
    assert 0 < (near - exact).norm() < 0.2 * exact.norm()


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    save(tmp_path, "mixtral")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(MissingWeight, match=r"layers\.1\.block_sparse_moe\.experts\.3\.w2\.weight"):
        load_model(tmp_path, torch.float32, CPU, MAX_MODEL_LEN)
