"""A method of quantization from outside the tree: a package with an entry point brings it."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.worker_svc.conftest import InstallPackage
from tests.worker_svc.models.test_models import MAX_MODEL_LEN
from tests.worker_svc.quantization.conftest import logits_and_tokens
from worker_svc.models import load_model
from worker_svc.quantization import registry
from worker_svc.quantization.scheme import UnsupportedQuantization

GROUP = registry.PLUG_INS
SHARES = """
from dataclasses import dataclass

from worker_svc.quantization.scheme import (
    FLOATS, PLAIN, Axis, TensorSpec, UnsupportedQuantization
)


@dataclass(frozen=True)
class Share:
    divisor: float
    min_capability: int = 0

    def tensors(self, num_outputs, num_inputs):
        return {"share": TensorSpec((num_outputs, num_inputs), FLOATS, Axis(0), Axis(1))}

    def read(self, found, cut):
        return found["share"] * self.divisor


@dataclass(frozen=True)
class Shares:
    layer: Share

    @property
    def label(self):
        return f"shares of {self.layer.divisor}"

    def scheme(self, name):
        return PLAIN if name.endswith("lm_head") else self.layer


def read(given):
    unknown = given.keys() - {"quant_method", "divisor"}
    if unknown:
        raise UnsupportedQuantization(f"quantization_config.{min(unknown)}: is not known")
    return Shares(Share(given["divisor"]))
"""


def shares_of(plain: Path, folder: Path, **more: object) -> Path:
    """A checkpoint whose linear layers but the head are stored as a quarter of their weights."""
    folder.mkdir()
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "shares", "divisor": 4.0, **more}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(plain / "model.safetensors")
    for name in [name for name in tensors if "_proj.weight" in name]:
        tensors[name.replace(".weight", ".share")] = tensors.pop(name) / 4
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_plug_in_reads_a_checkpoint_of_its_method(
    plain: Mapping[str, Path], tmp_path: Path, install_package: InstallPackage
) -> None:
    folder = shares_of(plain["llama"], tmp_path / "model")
    with pytest.raises(ValueError, match=r"'shares' is not supported; supported are awq, .*mxfp4$"):
        load_model(folder, torch.float32, torch.device("cpu"), MAX_MODEL_LEN)
    install_package("pagewire_shares", SHARES, GROUP, {"shares": "read"})
    found = load_model(folder, torch.float32, torch.device("cpu"), MAX_MODEL_LEN)
    wanted = load_model(plain["llama"], torch.float32, torch.device("cpu"), MAX_MODEL_LEN)
    logits, tokens = logits_and_tokens(found)
    expected, expected_tokens = logits_and_tokens(wanted)
    assert torch.equal(logits, expected), "a power of two divides without a rounding"
    assert tokens == expected_tokens


def test_its_own_refusals_end_the_load(
    plain: Mapping[str, Path], tmp_path: Path, install_package: InstallPackage
) -> None:
    install_package("pagewire_shares", SHARES, GROUP, {"shares": "read"})
    folder = shares_of(plain["llama"], tmp_path / "model", rotation="left")
    with pytest.raises(ValueError, match=r"quantization_config\.rotation: is not known"):
        load_model(folder, torch.float32, torch.device("cpu"), MAX_MODEL_LEN)


@pytest.mark.parametrize(
    ("source", "value", "said"),
    [
        ("import a_module_that_is_not_there", "read", "cannot be imported: ModuleNotFoundError"),
        ("x = 1", "read", "cannot be imported: AttributeError"),
        ("read = 1", "read", "pagewire_bad:read for shares reads no settings"),
    ],
)
def test_a_plug_in_that_cannot_be_used_is_named(
    source: str, value: str, said: str, install_package: InstallPackage
) -> None:
    install_package("pagewire_bad", source, GROUP, {"shares": value})
    with pytest.raises(UnsupportedQuantization, match=r"^quantization_config.quant_method: ") as e:
        registry.of_checkpoint({"quant_method": "shares"})
    assert said in str(e.value)


def test_a_built_in_method_is_not_replaced_and_two_of_a_name_are_refused(
    install_package: InstallPackage,
) -> None:
    given = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    before = registry.of_checkpoint(given)
    install_package("pagewire_first", SHARES, GROUP, {"fp8": "read", "shares": "read"})
    assert registry.of_checkpoint(given) == before
    install_package("pagewire_second", SHARES, GROUP, {"shares": "read"})
    with pytest.raises(
        UnsupportedQuantization, match=r"several plug-ins serve shares: .*first.*sec"
    ):
        registry.of_checkpoint({"quant_method": "shares", "divisor": 2.0})
    with pytest.raises(UnsupportedQuantization, match=r"'other' is not supported; .*, shares$"):
        registry.of_checkpoint({"quant_method": "other"})
