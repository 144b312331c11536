"""Checkpoints of gpt-oss with experts in MXFP4, of random codes, and their twins in float32."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SETTINGS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
WEIGHTS = ("experts.gate_up_proj", "experts.down_proj")


def save_mxfp4(plain: Path, into: Path, twin: Path) -> None:
    """Writes both out of a plain checkpoint, whose experts' weights count for their shape alone."""
    tensors = load_file(plain / "model.safetensors")
    shutil.copytree(plain, twin)
    shutil.copytree(plain, into)
    stored, numbers = {}, {}
    for seed, name in enumerate(sorted(tensors)):
        if name.endswith(WEIGHTS):
            blocks, scales = random_codes(tensors[name].transpose(1, 2).shape, seed)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            numbers[name] = meaning(blocks, scales).transpose(1, 2).contiguous()
        else:
            stored[name] = numbers[name] = tensors[name]
    save_file(stored, into / "model.safetensors", {"format": "pt"})
    save_file(numbers, twin / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = SETTINGS
    (into / "config.json").write_text(json.dumps(config))


def random_codes(shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of weights [E, N, K] of about 0.2."""
    num_experts, num_outputs, num_inputs = shape
    generator = torch.Generator().manual_seed(seed)
    size = num_experts, num_outputs, num_inputs // 32
    blocks = torch.randint(256, (*size, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(121, 125, size, generator=generator, dtype=torch.uint8)
    return blocks, scales


def meaning(blocks: Tensor, scales: Tensor) -> Tensor:
    """The numbers [..., N, K] by the definition of the format: sign, two exponents, a mantissa."""
    codes = torch.stack((blocks % 16, blocks // 16), -1).flatten(-2).int()
    sign, exponent, mantissa = 1 - 2 * (codes // 8), codes // 2 % 4, codes % 2
    small = mantissa * 0.5
    large = (1 + mantissa * 0.5) * 2.0 ** (exponent - 1)
    magnitude = torch.where(exponent == 0, small, large)
    return (sign * magnitude * 2.0 ** (scales.double() - 127)[..., None]).flatten(-2).float()
