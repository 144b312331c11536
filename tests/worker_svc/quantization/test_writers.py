"""Settings of today's writers: served, or refused by the one key that changes the output."""

import copy
import inspect
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.utils.quantization_config as theirs

from tests.worker_svc.models.configs import LLAMA
from tests.worker_svc.models.test_models import MAX_MODEL_LEN
from tests.worker_svc.quantization import writers
from tests.worker_svc.quantization.conftest import logits_and_tokens
from tests.worker_svc.quantized_checkpoints import FORMATS, gptq, save_quantized
from worker_svc.models import config as model_config
from worker_svc.models import load_model
from worker_svc.models.spec import ModelSpec, UnsupportedModel
from worker_svc.quantization import registry
from worker_svc.quantization.scheme import PLAIN, UnsupportedQuantization

CPU = torch.device("cpu")
LAYER = "model.layers.0.mlp.down_proj"
# What each class of transformers is by default; the others need their own library to be made.
BY_DEFAULT: dict[str, dict[str, Any] | None] = {
    "GPTQConfig": {"bits": 4},
    "QuantizationConfigMixin": None,
    "TorchAoConfig": None,
    "HqqConfig": None,
}
SERVED_CLASSES = {"GPTQConfig", "AwqConfig", "FineGrainedFP8Config", "Mxfp4Config"}


def written() -> dict[str, dict[str, Any]]:
    """The dictionary of each class of the installed transformers, as it comes back from JSON."""
    found = {}
    for name, made in inspect.getmembers(theirs, inspect.isclass):
        options = BY_DEFAULT.get(name, {})
        if not issubclass(made, theirs.QuantizationConfigMixin) or options is None:
            continue
        try:
            content = made(**options).to_dict()
        except ImportError:
            continue
        if "quant_method" in content:
            found[name] = json.loads(json.dumps(content, default=str))
    return found


WRITTEN = written()


def test_the_classes_of_transformers_are_there() -> None:
    assert WRITTEN.keys() >= SERVED_CLASSES and len(WRITTEN) > 12


@pytest.mark.parametrize("name", WRITTEN)
def test_what_transformers_writes_is_served_or_its_method_is_refused(name: str) -> None:
    if name in SERVED_CLASSES:
        assert registry.of_checkpoint(WRITTEN[name]) is not None
        return
    with pytest.raises(UnsupportedQuantization, match=r"quant_method: '[\w-]+' is not supported"):
        registry.of_checkpoint(WRITTEN[name])


@pytest.mark.parametrize("name", writers.SERVED)
def test_what_others_write_is_served(name: str) -> None:
    found = registry.of_checkpoint(copy.deepcopy(writers.SERVED[name]))
    assert (found is not None and found.scheme(LAYER) is not PLAIN) or "excluded" in name


def test_of_a_block_only_the_modules_that_are_named_are_quantized() -> None:
    found = registry.of_checkpoint(writers.SERVED["auto-round-some"])
    assert found is not None and found.scheme(LAYER) is not PLAIN
    for name in ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.xdown_proj", "lm_head"):
        assert found.scheme(name) is PLAIN


@pytest.mark.parametrize(
    "name", [name for name, it in writers.SERVED.items() if "ignore" not in it]
)
def test_a_head_inside_of_a_larger_model_is_a_head(name: str) -> None:
    found = registry.of_checkpoint(copy.deepcopy(writers.SERVED[name]))
    assert found is not None
    schemes = [found.scheme(head) for head in ("lm_head", "language_model.lm_head")]
    assert schemes[0] == schemes[1]


@pytest.mark.parametrize("asked", ["int8", "int4", "fp8"])
def test_a_head_is_not_rounded_at_load_wherever_it_stands(asked: str) -> None:
    found = registry.chosen(asked, None)
    assert found is not None and found.scheme(LAYER) is not PLAIN
    assert found.scheme("lm_head") is found.scheme("language_model.lm_head") is PLAIN


@pytest.mark.parametrize("name", writers.REFUSED)
def test_what_others_write_is_refused_by_the_one_key(name: str) -> None:
    given, key = writers.REFUSED[name]
    with pytest.raises(UnsupportedQuantization) as refused:
        registry.of_checkpoint(given)
    assert str(refused.value).startswith(f"quantization_config.{key}: ")


@pytest.mark.parametrize("name", ["gptq", "awq", "fp8-block", "packed"])
def test_how_weights_were_found_changes_no_output(name: str, tmp_path: Path) -> None:
    """What one writer says of its search is known under all methods."""
    said = {"nsamples": 512, "damp_percent": 0.1, "meta": {"uri": "x"}, "provider": "auto-round",
            "expert_dtype": "fp8", "scale_dtype": "torch.float32", "iters": 200}  # fmt: skip
    plain = registry.of_checkpoint(FORMATS[name].config)
    assert registry.of_checkpoint({**FORMATS[name].config, **said}) == plain


@pytest.mark.parametrize(
    ("form", "dynamic", "kept"),
    [
        (gptq(), {r"-:.*\.down_proj": {}}, r"down_proj"),
        (gptq(), {r"-:model\.layers\.0\.": {"bits": 3}, ".*": {"bits": 4}}, r"layers\.0\."),
        (gptq(), {r"+:.*q_proj": {"sym": False}, r"-:.*_proj": {}}, r"[^q]_proj"),
        (gptq(bits=8), {r".*": {"bits": 8}}, "none"),
    ],
)
def test_rules_for_layers_hold_in_their_order(
    form: Any, dynamic: dict[str, Any], kept: str, plain: Any, tmp_path: Path
) -> None:
    layers = [
        f"model.layers.{index}.{part}_proj"
        for index in range(2)
        for part in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate",
                     "mlp.up", "mlp.down")
    ]  # fmt: skip
    is_kept = frozenset(name for name in layers if re.search(kept, name))
    changed = {**form.config, "dynamic": dynamic}
    if form.config["bits"] == 8:
        changed["bits"] = 4  # the rule for all layers says otherwise
    form = type(form)(changed, form.write, is_kept)
    save_quantized(plain["llama"], tmp_path / "quantized", tmp_path / "twin", form)
    found = logits_and_tokens(load_model(tmp_path / "quantized", torch.float32, CPU, MAX_MODEL_LEN))
    twin = logits_and_tokens(load_model(tmp_path / "twin", torch.float32, CPU, MAX_MODEL_LEN))
    assert (found[0] - twin[0]).abs().max() < 2e-4 and found[1] == twin[1]


def load(folder: Path, *ignored: str, **changes: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    return model_config.load(folder, ignored)


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"quantization_config": writers.GPTQMODEL | {"new": 1}}, "quantization_config.new"),
        (
            {"quantization_config": writers.GPTQMODEL | {"rotation": "r"}},
            "quantization_config.rotation",
        ),
        (
            {
                "quantization_config": writers.LLM_COMPRESSOR
                | {"config_groups": {"g": {"new": 1, **writers._W4A16}}}
            },
            "quantization_config.config_groups.g.new",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "new": 1}}, "rope_scaling.new"),
        ({"rope_parameters": {"rope_theta": 1e5, "new": [1]}}, "rope_parameters.new"),
    ],
)
def test_a_key_in_a_dictionary_can_be_ignored_by_its_path(
    changes: dict[str, Any], path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UnsupportedModel, match=f"give --ignore-config-keys {path}|{path}: "):
        load(tmp_path, **changes)
    with pytest.raises(UnsupportedModel):
        load(tmp_path, path.rpartition(".")[2], **changes)  # the path, and not its end
    with caplog.at_level(logging.WARNING):
        load(tmp_path, path, **changes)
    assert f"config.json: {path} is ignored" in caplog.text


def test_what_is_read_cannot_be_ignored(tmp_path: Path) -> None:
    bits = {"quantization_config": writers.GPTQMODEL | {"bits": 3}}
    with pytest.raises(UnsupportedModel, match="bits: 3 is not supported"):
        load(tmp_path, "quantization_config.bits", **bits)
    with pytest.raises(UnsupportedModel, match="quantization_config is read"):
        load(tmp_path, "quantization_config", **bits)
