"""Folders of PEFT's format: what is read, and what is refused by its name."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from tests.worker_svc.adapters.peft_folders import MadeAdapter, save_adapter
from tests.worker_svc.random_models import save_random_model
from worker_svc.adapters import peft_config
from worker_svc.adapters.errors import BadAdapter
from worker_svc.adapters.reading import CONFIG, WEIGHTS, AdapterReader
from worker_svc.adapters.sites import LinearPart, Site
from worker_svc.models import load_model

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MADE = MadeAdapter(rank=4)
PREFIX = "base_model.model.model.layers.0"
Q_A, Q_B = (f"{PREFIX}.self_attn.q_proj.lora_{one}.weight" for one in "AB")
Change = Callable[[dict[str, Tensor], dict[str, Any]], None]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    folder = tmp_path_factory.mktemp("llama")
    model = save_random_model(folder, (LlamaConfig, LlamaForCausalLM), SHAPE)
    assert isinstance(model, LlamaForCausalLM)
    model.name_or_path = str(folder)
    return model


@pytest.fixture(scope="module")
def reader(llama: LlamaForCausalLM) -> AdapterReader:
    decoder = load_model(Path(llama.name_or_path), torch.float32, torch.device("cpu"), 64)
    return AdapterReader(decoder.adaptable.targets, 16, torch.float32)


def changed(model: LlamaForCausalLM, folder: Path, change: Change) -> Path:
    """A folder of an adapter whose tensors or configuration were changed."""
    MADE.save(model, folder)
    tensors = load_file(folder / WEIGHTS)
    config = json.loads((folder / CONFIG).read_text())
    change(tensors, config)
    return save_adapter(folder, tensors, config)


def test_each_module_has_its_rank_its_scale_and_its_outputs(
    llama: LlamaForCausalLM, reader: AdapterReader, tmp_path: Path
) -> None:
    made = replace(MADE, ranks={"k_proj": 2}, alphas={"v_proj": 1.0})
    adapter = reader.read("a", made.save(llama, tmp_path))
    assert adapter.rank == 4
    assert {*adapter.sites} == {Site(layer, part) for layer in range(2) for part in LinearPart}
    pairs = {name: (a, b) for name, a, b in made.pairs(llama)}
    qkv = adapter.sites[Site(1, LinearPart.QKV)]
    x = torch.randn(3, 32)
    found = torch.zeros(3, 32 + 16 + 16)
    for one in qkv.expansions:
        found[:, one.begin : one.end] = one.b(qkv.a(x)[:, one.first : one.last])
    wanted = []
    for module in ("q_proj", "k_proj", "v_proj"):
        name = f"model.layers.1.self_attn.{module}"
        a, b = pairs[name]
        wanted.append(made.scale_of(name) * x @ a.T @ b.T)
    torch.testing.assert_close(found, torch.cat(wanted, dim=1))


def _without(name: str) -> Change:
    return lambda tensors, config: tensors.pop(name)  # type: ignore[return-value]


def _with(name: str, *shape: int) -> Change:
    return lambda tensors, config: tensors.update({name: torch.ones(*shape)})


def _not_finite(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    tensors[Q_A][0, 0] = float("nan")


def _of_config(**keys: Any) -> Change:
    return lambda tensors, config: config.update(keys)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_without(Q_B), f"{Q_A}: its other matrix is missing"),
        (_with(Q_A, 4, 31), rf"{Q_A}: has shape \(4, 31\), expected \(4, 32\)"),
        (_with(Q_A, 5, 32), rf"{Q_A}: has shape \(5, 32\), expected \(4, 32\)"),
        (_with(Q_B, 31, 4), rf"{Q_B}: has shape \(31, 4\), expected \(32, 4\)"),
        (_with(f"{PREFIX}.self_attn.w_proj.lora_A.weight", 4, 32), "w_proj.*meets no module"),
        (_with("base_model.model.model.layers.2.mlp.up_proj.lora_A.weight", 4, 32), "layers.2.*no"),
        (_with("base_model.model.lm_head.lora_A.weight", 4, 32), "adapters of the head"),
        (_with("base_model.model.model.embed_tokens.lora_embedding_A", 4, 64), "of embeddings"),
        (_with(f"{PREFIX}.self_attn.q_proj.lora_magnitude_vector", 32), "DoRA"),
        (_with(f"{PREFIX}.self_attn.q_proj.lora_B.bias", 32), "biases of adapters"),
        (_with(f"{PREFIX}.mlp.experts.0.w1.lora_A.weight", 4, 32), "adapters of experts"),
        (_with("model.layers.0.self_attn.q_proj.lora_A.weight", 4, 32), "is no matrix of LoRA"),
        (_not_finite, f"{Q_A}: has values that are not finite"),
        (lambda tensors, config: tensors.clear(), f"{WEIGHTS}: has no tensors"),
        (_of_config(target_modules=["q_proj", "w_proj"]), "target_modules: 'w_proj' has no"),
        (_of_config(peft_type="IA3"), "peft_type: 'IA3'"),
        (_of_config(use_dora=True), "use_dora: DoRA"),
        (_of_config(modules_to_save=["lm_head"]), "modules_to_save"),
        (_of_config(bias="all"), "bias: 'all'"),
        (_of_config(lora_bias=True), "lora_bias: True is not supported"),
        (_of_config(fan_in_fan_out=True), "fan_in_fan_out: True is not supported"),
        (_of_config(init_lora_weights="pissa_niter_4"), "init_lora_weights: 'pissa_niter_4'"),
        (_of_config(something_new={"a": 1}), "something_new: .* is not supported"),
        (_of_config(trainable_token_indices=[1]), "trainable_token_indices"),
        (_of_config(target_parameters=["experts.gate_up"]), "target_parameters"),
        (_of_config(r=17), "r: 17 is above max_lora_rank 16"),
        (_of_config(rank_pattern={"q_proj": 17}), "q_proj: rank 17 is above max_lora_rank 16"),
        (_of_config(r=0), "r: 0 is no rank"),
        (_of_config(r=True), "r: True is no rank"),
        (_of_config(lora_alpha="16"), "lora_alpha: '16' is no finite number"),
        (_of_config(lora_alpha=1e400), "lora_alpha: inf is no finite number"),
        (_of_config(alpha_pattern={"q_proj": None}), "alpha_pattern.q_proj: None is no finite"),
        (_of_config(rank_pattern={"(a|a)*": 4}), "rank_pattern: .* is too complex"),
        (_of_config(rank_pattern={".*.*.*.*": 4}), "rank_pattern: .* is too complex"),
        (_of_config(rank_pattern={"q_proj(": 4}), "rank_pattern: .* is no pattern"),
        (_of_config(rank_pattern=[4]), "rank_pattern: is no object"),
        (_of_config(use_rslora="yes"), "use_rslora: 'yes' is neither true nor false"),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(
    llama: LlamaForCausalLM, reader: AdapterReader, tmp_path: Path, change: Change, problem: str
) -> None:
    with pytest.raises(BadAdapter, match=problem):
        reader.read("a", changed(llama, tmp_path, change))


def test_values_that_ask_for_nothing_are_no_reason(
    llama: LlamaForCausalLM, reader: AdapterReader, tmp_path: Path
) -> None:
    nothing = _of_config(
        layer_replication=None, lora_bias=False, something_new=[], init_lora_weights="gaussian"
    )
    assert reader.read("a", changed(llama, tmp_path, nothing)).rank == 4


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_missing_and_damaged_files(
    llama: LlamaForCausalLM, reader: AdapterReader, tmp_path: Path, name: str
) -> None:
    MADE.save(llama, tmp_path)
    content = (tmp_path / name).read_bytes()
    for length in (0, 7, len(content) // 2):
        (tmp_path / name).write_bytes(content[:length])
        with pytest.raises(BadAdapter, match=rf"{name}: cannot be read"):
            reader.read("a", tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(BadAdapter, match=f"has no {name}"):
        reader.read("a", tmp_path)
    (tmp_path / name).mkdir()
    with pytest.raises(BadAdapter, match=rf"{name}: cannot be read"):
        reader.read("a", tmp_path)
    with pytest.raises(BadAdapter, match="is no folder"):
        reader.read("a", tmp_path / "nowhere")


def test_an_id_is_of_the_name_and_the_content(
    llama: LlamaForCausalLM, reader: AdapterReader, tmp_path: Path
) -> None:
    folder, twin = MADE.save(llama, tmp_path / "a"), MADE.save(llama, tmp_path / "b")
    other = replace(MADE, seed=1).save(llama, tmp_path / "c")
    scaled = replace(MADE, alpha=8).save(llama, tmp_path / "d")
    ids = [reader.read("x", one).source.adapter_id for one in (folder, twin, other, scaled)]
    assert ids[0] == ids[1]
    assert len({*ids}) == 3
    assert reader.read("y", folder).source.adapter_id not in ids
    assert reader.read("x", twin, ids[0]).source.path == str(twin)
    with pytest.raises(BadAdapter, match="holds another adapter than when 'x' was loaded"):
        reader.read("x", other, ids[0])


def test_a_pattern_matches_as_in_peft() -> None:
    config = peft_config.parse(
        json.dumps(
            {
                "peft_type": "LORA",
                "r": 8,
                "lora_alpha": 16,
                "rank_pattern": {r"^model\.layers\.1\.mlp\.up_proj": 2, "up_proj": 4, "q": 3},
                "alpha_pattern": {r"layers\.\d+\.self_attn\.(q_proj|k_proj)": 4},
            }
        ).encode()
    )
    up, q = "model.layers.{}.mlp.up_proj", "model.layers.12.self_attn.q_proj"
    assert [config.rank_of(up.format(index)) for index in (0, 1, 11)] == [4, 2, 4]
    assert config.rank_of(q) == 8  # "q" is no whole part of the name
    assert config.scale_of(q) == 0.5
    assert config.scale_of("model.layers.1.self_attn.v_proj") == 2


def test_experts_take_no_adapter_and_their_attention_does(tmp_path: Path) -> None:
    config = SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = save_random_model(tmp_path / "base", (MixtralConfig, MixtralForCausalLM), config)
    decoder = load_model(tmp_path / "base", torch.float32, torch.device("cpu"), 64)
    reader = AdapterReader(decoder.adaptable.targets, 16, torch.float32)
    attention = MadeAdapter(("q_proj", "o_proj")).save(model, tmp_path / "attention")
    assert len(reader.read("a", attention).sites) == 4
    tensors = load_file(attention / WEIGHTS)
    tensors[f"{PREFIX}.block_sparse_moe.gate.lora_A.weight"] = torch.ones(8, 32)
    config = json.loads((attention / CONFIG).read_text())
    with pytest.raises(
        BadAdapter, match=r"gate.* meets no module that takes adapters here: k_proj"
    ):
        reader.read("a", save_adapter(tmp_path / "router", tensors, config))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_folder_that_may_not_be_read(
    llama: LlamaForCausalLM, reader: AdapterReader, tmp_path: Path
) -> None:
    MADE.save(llama, tmp_path)
    (tmp_path / WEIGHTS).chmod(0)
    with pytest.raises(BadAdapter, match=rf"{WEIGHTS}: cannot be read"):
        reader.read("a", tmp_path)
