"""Hybrids in 8-bit floats, rounded at load or in a checkpoint: what they stand for, computed."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.worker_svc.models.test_delta_net import stack_experts
from tests.worker_svc.models.test_experts import logits_of
from tests.worker_svc.models.test_models import make_prompts
from tests.worker_svc.quantized_checkpoints import CHANNEL, FORMATS, float8, save_quantized
from tests.worker_svc.transformers_models.families import write
from worker_svc.models import Decoder
from worker_svc.models import config as model_config
from worker_svc.models.experts import Listed
from worker_svc.models.linear import WeightRows
from worker_svc.models.spec import UnsupportedModel
from worker_svc.models.stored.quantized import load_quantized
from worker_svc.parallel.group import Group
from worker_svc.quantization.scheme import UnsupportedQuantization

CPU = torch.device("cpu")
NAMES = ["qwen3_next", "qwen3_5_moe", "qwen3_5", "nemotron_h", "lfm2_moe"]
# What is rounded at load: linear layers of mixers and MLPs, and experts.
ROUNDED = re.compile(
    r".*\.((q|k|v|o|in|out|gate|up|down)_proj\.weight"
    r"|in_proj_(qkv|z|qkvz)\.weight|w[123]\.weight"
    r"|experts\.(gate_up|down)_proj)"
)

KEPT = re.compile(
    r"conv|embed|lm_head|(gate|router\.layer)\.weight|shared_expert_gate|in_proj_(a|b|ba)\."
)


def rounded(weight: Tensor) -> Tensor:
    """The numbers that a weight [N, K], or weights [E, N, K], stand for in 8 bits by channel."""
    matrices = weight.reshape(-1, *weight.shape[-2:])
    return torch.stack([float8(CHANNEL)(each)[1] for each in matrices]).view(weight.shape)


def save_twin(plain: Path, twin: Path) -> list[str]:
    """Writes the checkpoint with rounded numbers; returns the names of what was not rounded."""
    shutil.copytree(plain, twin)
    tensors = load_file(plain / "model.safetensors")
    found = {name: rounded(one) for name, one in tensors.items() if ROUNDED.fullmatch(name)}
    save_file(tensors | found, twin / "model.safetensors", {"format": "pt"})
    return [name for name, one in tensors.items() if name not in found and one.ndim > 1]


@pytest.mark.parametrize("name", NAMES)
def test_rounding_at_load_gives_the_logits_of_the_rounded_numbers(
    tmp_path: Path, name: str
) -> None:
    plain = write(name, tmp_path / "plain")
    if name == "qwen3_5_moe":
        stack_experts(plain)
    left = save_twin(plain, tmp_path / "twin")
    assert all(KEPT.search(each) for each in left), left
    (prompt,) = make_prompts(20)
    expected = logits_of(tmp_path / "twin", prompt)
    assert expected.abs().max() > 0.5 and not torch.allclose(expected, logits_of(plain, prompt))
    torch.testing.assert_close(logits_of(plain, prompt, "fp8"), expected)


@pytest.mark.parametrize("form", ["fp8-channel", "fp8-block"])
def test_a_checkpoint_in_8_bits_gives_the_logits_of_its_twin(tmp_path: Path, form: str) -> None:
    """A group of heads cuts blocks, too; some layers are left as they are."""
    plain = write("qwen3_next", tmp_path / "plain")
    save_quantized(plain, tmp_path / "q", tmp_path / "twin", FORMATS[form])
    stored = load_file(tmp_path / "q" / "model.safetensors")
    assert any(name.endswith("in_proj_qkvz.weight") for name in stored if stored[name].itemsize < 2)
    (prompt,) = make_prompts(20)
    settings = json.loads((tmp_path / "q" / "config.json").read_text())
    steps = [f"model.layers.{index}.linear_attn.in_proj_ba" for index in range(2)]
    key = "modules_to_not_convert" if form == "fp8-block" else "ignore"
    settings["quantization_config"].setdefault(key, []).extend(["lm_head", *steps])
    (tmp_path / "q" / "config.json").write_text(json.dumps(settings))
    expected = logits_of(tmp_path / "twin", prompt)
    torch.testing.assert_close(logits_of(tmp_path / "q", prompt), expected)


def weights(folder: Path, rank: int, size: int) -> tuple[Decoder, dict[str, Tensor]]:
    """The model of a rank, and its weights by name; those of all experts in one tensor."""
    spec = model_config.load(folder, quantization="fp8")
    assert spec.quantization is not None
    model = Decoder(spec, torch.float32, CPU, 96, Group(rank, size))
    destinations, share = dict(model.destinations()), model.sharding.share
    load_quantized(folder, spec.quantization, destinations, frozenset(), share, CPU)
    found = {name: to.values for name, to in destinations.items() if isinstance(to, WeightRows)}
    lists = {name: to for name, to in destinations.items() if isinstance(to, Listed)}
    return model, found | {
        name: torch.stack([part.values for part in to.parts]) for name, to in lists.items()
    }


def test_ranks_have_parts_of_each_section_and_expert(tmp_path: Path) -> None:
    """Sections of a delta net's projection and of gate and up are divided one by one."""
    folder = write("qwen3_5_moe", tmp_path / "plain")
    stack_experts(folder)
    _, whole = weights(folder, 0, 1)
    sections = 0
    for rank in range(2):
        model, parts = weights(folder, rank, 2)
        assert any(part.ndim == 3 for part in parts.values())
        for name, part in parts.items():
            share = model.sharding.share(name)
            if share is None:
                assert torch.equal(part, whole[name]), name
                continue
            sections += bool(share.sections)
            of_whole = share.cut(whole[name], part.shape[share.dim])
            # Columns of a rank have a scale of their own: half a step of 8 bits, of the largest.
            bound = 0.0 if share.dim == part.ndim - 2 else 2.0**-3 * float(of_whole.abs().max())
            assert (part - of_whole).abs().max() <= bound, name
    assert sections == 2 * (2 + 3)  # two delta nets, experts in three layers


@pytest.mark.parametrize("form", ["int8", "gptq"])
def test_integers_are_refused_by_name(tmp_path: Path, form: str) -> None:
    plain = write("qwen3_5", tmp_path / "plain")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = dict(FORMATS[form].config)
    (plain / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"^quantization: .* states; only 8-bit floats are"):
        model_config.load(plain)


def test_experts_that_one_tensor_holds_in_8_bits_are_refused_by_name(tmp_path: Path) -> None:
    folder = write("qwen3_5_moe", tmp_path / "plain")
    stack_experts(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = dict(FORMATS["fp8-block"].config)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedQuantization, match="experts that one tensor holds"):
        logits_of(folder, torch.arange(3))
