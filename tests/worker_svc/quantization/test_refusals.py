"""Settings and tensors that cannot be served are refused by the name of key or tensor."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.worker_svc.models.test_models import MAX_MODEL_LEN
from tests.worker_svc.quantized_checkpoints import FORMATS, save_quantized
from worker_svc.config import QUANTIZATIONS, WorkerConfig
from worker_svc.models import load_model
from worker_svc.models.spec import UnsupportedModel
from worker_svc.models.stored.weight_files import WeightError
from worker_svc.quantization import registry
from worker_svc.quantization.online import ONLINE
from worker_svc.quantization.scheme import UnsupportedQuantization
from worker_svc.startup.implementation import shape_of

CPU = torch.device("cpu")
KV = {"num_bits": 8, "type": "float", "strategy": "tensor"}


def settings(name: str, **changes: Any) -> dict[str, Any]:
    """The settings of a format, with changes to it, or with a dot to its one group of layers."""
    given = dict(FORMATS[name].config)
    for key, value in changes.items():
        part, _, last = key.partition("__")
        if not last:
            given[key] = value
            continue
        group = dict(given["config_groups"]["group_0"])
        group[part] = (group.get(part) or {}) | {last: value} if last != "whole" else value
        given["config_groups"] = {"group_0": group}
    return given


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_served_is_named(name: str) -> None:
    found = registry.of_checkpoint(settings(name))
    assert found is not None and found.label.startswith(FORMATS[name].config["quant_method"])


@pytest.mark.parametrize("method", ["bitsandbytes", "nvfp4", "modelopt", "hqq", None, 4, ["gptq"]])
def test_other_methods_are_refused_with_a_list_of_these(method: object) -> None:
    with pytest.raises(UnsupportedQuantization) as refused:
        registry.of_checkpoint({"quant_method": method, "load_in_4bit": True})
    assert f"quant_method: {method!r} is not supported" in str(refused.value)
    assert "awq, compressed-tensors, fp8, gptq, mxfp4" in str(refused.value)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (settings("gptq", a_key_of_tomorrow=1), "a_key_of_tomorrow: this key is not known"),
        (settings("awq", a_key_of_tomorrow=1), "a_key_of_tomorrow: this key is not known"),
        (settings("fp8-block", a_key_of_tomorrow=1), "a_key_of_tomorrow: this key is not known"),
        (settings("packed", a_key_of_tomorrow=1), "a_key_of_tomorrow: this key is not known"),
        (settings("packed", weights__tomorrow=1), r"group_0.weights.tomorrow: this key"),
        (settings("gptq", bits=3), "bits: 3 is not supported; supported are 4, 8"),
        (settings("gptq", bits=True), "bits: True"),
        (settings("gptq", group_size=0), "group_size: 0 is neither"),
        (settings("gptq", checkpoint_format="marlin"), "checkpoint_format: .*marlin"),
        (settings("gptq", dynamic=["-:lm_head"]), "dynamic: "),
        (settings("gptq", dynamic={"-:lm_head": None}), "dynamic.-:lm_head: None"),
        (settings("gptq", modules_in_block_to_quantize=[[1]]), "modules_in_block_to_quantize: "),
        (settings("awq", bits=8), "bits: 8"),
        (settings("awq", version="gemv"), "version: 'gemv'"),
        (settings("awq", zero_point=0), "zero_point: 0"),
        (settings("awq", format="llm-awq"), "format: 'llm-awq'"),
        (settings("awq", desc_act=True), "desc_act: True"),
        (settings("fp8-block", modules_to_convert=["x"]), "modules_to_convert: "),
        (settings("fp8-block", fmt="e5m2"), "fmt: 'e5m2'"),
        (settings("fp8-block", weight_block_size=[128]), "weight_block_size: "),
        (settings("fp8-block", weight_block_size=[0, 128]), "weight_block_size: "),
        (settings("fp8-block", activation_scheme="none"), "activation_scheme: 'none'"),
        (settings("packed", format="nvfp4-pack-quantized"), "format: 'nvfp4-pack-quantized'"),
        (settings("packed", format="marlin-24"), "format: 'marlin-24'"),
        (settings("packed", kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme.type: None"),
        (settings("packed", kv_cache_scheme=KV | {"type": "int"}), "type: 'int'"),
        (settings("packed", kv_cache_scheme=KV | {"num_bits": 4}), "num_bits: 4"),
        (settings("packed", kv_cache_scheme=KV | {"strategy": "channel"}), "strategy: 'channel'"),
        (settings("packed", kv_cache_scheme=KV | {"dynamic": True}), "dynamic: True"),
        (settings("packed", kv_cache_scheme=KV | {"symmetric": False}), "symmetric: False"),
        (settings("packed", kv_cache_scheme=KV | {"group_size": 128}), "group_size: 128"),
        (settings("packed", kv_cache_scheme=KV | {"tomorrow": 1}), "tomorrow: this key"),
        (settings("packed", kv_cache_scheme="static"), "'static' is not an object"),
        (settings("packed", sparsity_config={"format": "24"}), "sparsity_config: "),
        (settings("packed", quantization_status="frozen"), "quantization_status: 'frozen'"),
        (settings("packed", config_groups={}), "config_groups: {} has no groups"),
        (settings("packed", ignore="lm_head"), "ignore: 'lm_head' is not a list"),
        (settings("packed", ignore=["re:("]), r"ignore: 're:\('"),
        (settings("packed", weights__num_bits=2), "num_bits: 2"),
        (settings("packed", weights__actorder="later"), "actorder: 'later'"),
        (settings("packed", weights__strategy="tensor_group"), "strategy: 'tensor_group'"),
        (settings("packed", weights__whole=None), "weights: None is not an object"),
        (settings("packed", output_activations__num_bits=8), "output_activations: "),
        (settings("fp8-channel", weights__symmetric=False), "symmetric: False"),
        (settings("fp8-channel", input_activations__num_bits=4), "num_bits: 4"),
        ("gptq", "'gptq' is not an object"),
    ],
)  # fmt: skip
def test_settings_that_would_change_the_output_are_refused_by_name(
    given: object, named: str
) -> None:
    with pytest.raises(UnsupportedQuantization, match=named):
        registry.of_checkpoint(given)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gptq", {"desc_act": None, "sym": None, "lm_head": None}),
        ("awq", {"version": None, "zero_point": None}),
        ("fp8-block", {"fmt": None, "activation_scheme": None}),
        ("packed", {"quantization_status": None, "weights__dynamic": None}),
        ("packed", {"weights__actorder": None, "weights__symmetric": None}),
    ],
)
def test_null_asks_for_what_an_absent_key_does(name: str, changes: dict[str, None]) -> None:
    assert registry.of_checkpoint(settings(name, **changes)) == registry.of_checkpoint(
        settings(name)
    )


def test_the_option_is_refused_where_it_has_nothing_to_round() -> None:
    stored = registry.of_checkpoint(settings("gptq"))
    assert registry.chosen("auto", stored) is stored
    with pytest.raises(UnsupportedQuantization, match=r"quantization: fp8 .*quantized already"):
        registry.chosen("fp8", stored)
    with pytest.raises(UnsupportedQuantization, match=r"'nf4'.*are auto, fp8, int8, int4"):
        registry.chosen("nf4", None)
    assert {"auto", *ONLINE, *registry.STORED} == set(QUANTIZATIONS)


@pytest.mark.parametrize(
    ("checkpoint", "names"),
    [
        ("gptq", {"gptq", "gptq_marlin"}),
        ("awq", {"awq", "awq_marlin"}),
        ("fp8-block", {"fp8"}),
        ("packed", {"compressed-tensors"}),
    ],
)
def test_the_checkpoints_own_method_may_be_named_and_no_other(
    checkpoint: str, names: set[str]
) -> None:
    stored = registry.of_checkpoint(settings(checkpoint))
    assert stored is not None
    for name in names:
        assert registry.chosen(name, stored) is stored
    for other in registry.STORED.keys() - names:
        with pytest.raises(UnsupportedQuantization, match=f"quantization: {other}") as refused:
            registry.chosen(other, stored)
        assert stored.label in str(refused.value)
    for name in registry.STORED.keys() - ONLINE.keys():
        with pytest.raises(UnsupportedQuantization, match=f"{name}, but .* has plain weights"):
            registry.chosen(name, None)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("awq", r"^quantization: awq, but the checkpoint has gptq, 4 bits"),
        ("int8", r"^quantization: int8 rounds plain weights; these are quantized already \(gptq"),
    ],
)
def test_the_reason_is_not_hidden_by_what_transformers_would_refuse(
    asked: str, said: str, plain: Mapping[str, Path], tmp_path: Path
) -> None:
    config = json.loads((plain["llama"] / "config.json").read_text())
    config["quantization_config"] = settings("gptq")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=said):
        shape_of(WorkerConfig(device="cpu", quantization=asked), tmp_path, torch.device("cpu"))


Damage = Callable[[Tensor], Tensor]


def first(value: float) -> Damage:
    """Sets the first element."""

    def damaged(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        changed.view(-1)[0] = value
        return changed

    return damaged


LAYER = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("name", "suffix", "damage", "named"),
    [
        ("gptq", "scales", None, "not found"),
        ("gptq", "scales", first(float("nan")), "not finite and above zero"),
        ("gptq", "scales", first(0), "not finite and above zero"),
        ("gptq", "scales", first(-1), "not finite and above zero"),
        ("gptq", "scales", first(float("inf")), "not finite and above zero"),
        ("gptq", "scales", lambda t: t[:, :-1], "has shape"),
        ("gptq", "qweight", lambda t: t.long(), "has type int64, expected int32"),
        ("gptq", "qzeros", lambda t: t[:-1], "has shape"),
        ("gptq", "g_idx", first(5), "not in order"),
        ("gptq", "g_idx", first(99), "not in order"),
        ("gptq", "bias", first(0.5), "no such parameter"),
        ("gptq-order", "g_idx", first(99), "a group outside 0 to 7"),
        ("gptq-order", "g_idx", first(-1), "a group outside 0 to 7"),
        ("packed-order", "weight_g_idx", first(8), "a group outside 0 to 7"),
        ("packed", "weight_shape", first(65), r"says \[65, 128\], expected \[64, 128\]"),
        ("packed", "weight_scale", first(float("nan")), "not finite and above zero"),
        ("packed", "weight_packed", lambda t: t[:, :-1], "has shape"),
        ("packed-asymmetric", "weight_zero_point", None, "not found"),
        ("awq", "qzeros", None, "not found"),
        ("awq", "qweight", lambda t: t.t(), "has shape"),
        ("fp8-block", "weight_scale_inv", first(0), "not finite and above zero"),
        ("fp8-block", "weight", lambda t: t.bfloat16(), "has type bfloat16, expected float8"),
        ("fp8-channel", "weight", lambda t: first(0x7F)(t.view(torch.uint8)).view(t.dtype),
         "a value that is not a number"),
        ("fp8-static", "input_scale", first(float("inf")), "not finite and above zero"),
        ("int8", "weight_scale", first(0), "not finite and above zero"),
    ],
)  # fmt: skip
def test_damaged_tensors_are_named(
    name: str,
    suffix: str,
    damage: Damage | None,
    named: str,
    plain: Mapping[str, Path],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "q"
    save_quantized(plain["llama"], folder, tmp_path / "twin", FORMATS[name])
    tensors = load_file(folder / "model.safetensors")
    tensor = f"{LAYER}.{suffix}"
    whole = tensors.pop(tensor)
    if damage is not None:
        tensors[tensor] = damage(whole).contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightError, match=rf"{tensor}\b.*{named}"):
        load_model(folder, torch.float32, CPU, MAX_MODEL_LEN)


def test_tensors_that_nothing_reads_are_refused(plain: Mapping[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "q"
    save_quantized(plain["llama"], folder, tmp_path / "twin", FORMATS["packed"])
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{LAYER}.weight_global_scale"] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightError, match=r"weight_global_scale: the model has no such"):
        load_model(folder, torch.float32, CPU, MAX_MODEL_LEN)


@pytest.mark.parametrize("name", ["packed", "gptq", "awq"])
def test_groups_that_do_not_divide_the_inputs_are_refused(
    name: str, plain: Mapping[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "q"
    save_quantized(plain["llama"], folder, tmp_path / "twin", FORMATS[name])
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"group_size": 16', '"group_size": 24'))
    with pytest.raises(WeightError, match=r"q_proj\.\w+: groups of 24 do not divide 64 inputs"):
        load_model(folder, torch.float32, CPU, MAX_MODEL_LEN)
