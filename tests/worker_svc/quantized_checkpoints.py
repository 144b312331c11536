"""Quantized copies of a checkpoint in each format, and the numbers that they stand for.

Written from the formats' descriptions, with nothing of what reads them.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Written = tuple[dict[str, Tensor], Tensor]  # tensors by suffix, and the numbers they stand for

LINEAR = re.compile(
    r"model\.layers\.\d+\.((self_attn|mlp|mlp\.experts\.\d+|mlp\.shared_experts?)\.\w+_proj"
    r"|linear_attn\.(in_proj_qkvz?|in_proj_z|out_proj))\.weight"
)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output in each nibble of a word, lowest first
GROUP = 16


@dataclass(frozen=True, slots=True)
class Format:
    """Settings for config.json, and how a weight [N, K] is written."""

    config: Mapping[str, Any]
    write: Callable[[Tensor], Written]
    kept: frozenset[str] = field(default_factory=frozenset)  # linear layers that are not quantized


def save_quantized(plain: Path, folder: Path, twin: Path, form: Format) -> None:
    """Writes the checkpoint `plain` in a format, and its dequantized twin."""
    tensors = load_file(plain / "model.safetensors")
    numbers = dict(tensors)
    for name, tensor in numbers.items():
        layer = name.removesuffix(".weight")
        if LINEAR.fullmatch(name) and layer not in form.kept:
            del tensors[name]
            written, numbers[name] = form.write(tensor.float())
            # Zeros as biases, which some writers add, stand in for none that is there.
            tensors = {f"{layer}.{suffix}": part for suffix, part in written.items()} | tensors
    _save(plain, folder, tensors, {"quantization_config": dict(form.config)})
    _save(plain, twin, numbers, {})


def _save(plain: Path, folder: Path, tensors: Mapping[str, Tensor], more: dict[str, Any]) -> None:
    folder.mkdir()
    for path in plain.iterdir():
        if path.suffix == ".json":
            shutil.copy(path, folder)
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | more))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors")


def words(elements: Tensor, bits: int, dim: int) -> Tensor:
    """Unsigned elements -> int32 words along a dimension, the first in the lowest bits."""
    per_word = 32 // bits
    last = np.moveaxis(elements.numpy().astype(np.uint64), dim, -1)
    padded = np.pad(last, [(0, 0)] * (last.ndim - 1) + [(0, -last.shape[-1] % per_word)])
    nibbles = padded.reshape(*last.shape[:-1], -1, per_word)
    packed = (nibbles << np.arange(0, 32, bits, dtype=np.uint64)).sum(-1, dtype=np.uint64)
    signed = np.moveaxis(packed, -1, dim).astype(np.uint32).view(np.int32)
    return torch.from_numpy(np.ascontiguousarray(signed))


@dataclass(frozen=True, slots=True)
class Rounded:
    """Integers [N, K] with scales and zeros [N, groups], and the group of each column."""

    integers: Tensor
    scales: Tensor  # float16
    zeros: Tensor
    columns: Tensor

    def numbers(self) -> Tensor:
        zeros, scales = self.zeros[:, self.columns], self.scales[:, self.columns]
        return (self.integers - zeros).float() * scales.float()


def rounded(
    weight: Tensor, bits: int, group: int | None, symmetric: bool, scattered: bool = False
) -> Rounded:
    """Rounds to the nearest; scattered groups have columns from everywhere."""
    num_inputs = weight.shape[1]
    columns = torch.arange(num_inputs) // (group or num_inputs)
    if scattered:
        columns = columns[torch.randperm(num_inputs, generator=torch.Generator().manual_seed(5))]
    top = 2**bits - 1
    scales, zeros = [], []
    for index in range(int(columns.max()) + 1):
        part = weight[:, columns == index]
        if symmetric:
            scale = (part.abs().amax(1) * 2 / top).half()
            zero = torch.full_like(scale, 2 ** (bits - 1))
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale = ((high - low) / top).half()
            zero = (-low / scale.float()).round()
        scales.append(scale)
        zeros.append(zero.long().clamp(0, top))
    scale, zero = torch.stack(scales, 1), torch.stack(zeros, 1)
    integers = (weight / scale.float()[:, columns]).round().long() + zero[:, columns]
    return Rounded(integers.clamp(0, top), scale, zero, columns)


def compressed(weights: dict[str, Any], form: str, **more: Any) -> dict[str, Any]:
    """Settings of compressed-tensors with one group of layers."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    inputs = more.pop("input_activations", None)
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group | {"input_activations": inputs}},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    } | more


def packed(
    bits: int = 4, group: int | None = GROUP, symmetric: bool = True, scattered: bool = False
) -> Format:
    """compressed-tensors, pack-quantized."""

    def write(weight: Tensor) -> Written:
        found = rounded(weight, bits, group, symmetric, scattered)
        tensors = {
            "weight_packed": words(found.integers, bits, 1),
            "weight_scale": found.scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(found.zeros, bits, 0)
        if scattered:
            tensors["weight_g_idx"] = found.columns.int()
        return tensors, found.numbers()

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False,
               "strategy": "group" if group else "channel", "group_size": group,
               "actorder": "group" if scattered else None, "observer": "minmax"}  # fmt: skip
    return Format(compressed(weights, "pack-quantized"), write)


def gptq(
    bits: int = 4,
    group: int = GROUP,
    symmetric: bool = True,
    scattered: bool = False,
    version: str = "gptq",
) -> Format:
    """GPTQ of either version, with and without act-order."""

    def write(weight: Tensor) -> Written:
        found = rounded(weight, bits, None if group == -1 else group, symmetric, scattered)
        stored = found.zeros - (1 if version == "gptq" else 0)
        tensors = {
            "qweight": words(found.integers.t(), bits, 0),
            "qzeros": words(stored.t() % 2**bits, bits, 1),
            "scales": found.scales.t(),
            "g_idx": found.columns.int(),
            "bias": torch.zeros(len(weight), dtype=torch.float16),
        }
        return tensors, found.numbers()

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": scattered,
              "sym": symmetric, "checkpoint_format": version, "damp_percent": 0.01}  # fmt: skip
    return Format(config, write)


def awq(group: int = GROUP) -> Format:
    """AWQ of version gemm."""

    def interleaved(elements: Tensor) -> Tensor:
        rows = elements.reshape(len(elements), -1, 8)
        return words(rows[..., torch.tensor(AWQ_ORDER)].flatten(1), 4, 1)

    def write(weight: Tensor) -> Written:
        found = rounded(weight, 4, group, symmetric=False)
        tensors = {
            "qweight": interleaved(found.integers.t()),
            "qzeros": interleaved(found.zeros.t()),
            "scales": found.scales.t(),
        }
        return tensors, found.numbers()

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True,
              "version": "gemm", "modules_to_not_convert": None}  # fmt: skip
    return Format(config, write)


def int8(channel: bool = True, static: bool = False, symmetric: bool = True) -> Format:
    """compressed-tensors, int-quantized."""

    def write(weight: Tensor) -> Written:
        by_row = weight if channel else weight.reshape(1, -1)
        found = rounded(by_row, 8, None, symmetric)
        signed = (found.integers - 128).to(torch.int8).reshape(weight.shape)
        tensors = {
            "weight": signed,
            "weight_scale": found.scales if channel else found.scales.reshape(1),
        }
        if not symmetric:
            zeros = (found.zeros - 128).to(torch.int8)
            tensors["weight_zero_point"] = zeros if channel else zeros.reshape(1)
        if static:
            tensors["input_scale"] = torch.tensor([0.02])
        return tensors, found.numbers().reshape(weight.shape)

    weights = {"num_bits": 8, "type": "int", "symmetric": symmetric,
               "strategy": "channel" if channel else "tensor"}  # fmt: skip
    return Format(compressed(weights, "int-quantized", input_activations=_inputs(static)), write)


def _inputs(static: bool) -> dict[str, Any]:
    strategy = "tensor" if static else "token"
    return {"num_bits": 8, "symmetric": True, "strategy": strategy, "dynamic": not static}


def float8(
    block: tuple[int, int] | None, name: str = "weight_scale", static: bool = False
) -> Callable[[Tensor], Written]:
    """A writer of e4m3 values with a scale a block; None: one of all."""

    def write(weight: Tensor) -> Written:
        rows, columns = block or weight.shape
        rows, columns = min(rows, weight.shape[0]), min(columns, weight.shape[1])
        scales = torch.tensor(
            [[float(part.abs().max()) / 448 for part in line.split(columns, 1)]
             for line in weight.split(rows, 0)]
        )  # fmt: skip
        wide = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        wide = wide[: weight.shape[0], : weight.shape[1]]
        values = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors = {"weight": values, name: scales.reshape(1) if block is None else scales}
        if static:
            tensors["input_scale"] = torch.tensor([0.02])
        return tensors, values.float() * wide

    return write


CHANNEL = (1, 1 << 30)


def compressed_float8(strategy: str, static: bool = False) -> Format:
    """compressed-tensors, float-quantized."""
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": strategy}
    block: tuple[int, int] | None = None if strategy == "tensor" else CHANNEL
    if strategy == "block":
        block, weights["block_structure"] = (32, 16), [32, 16]
    inputs = _inputs(static) | {"type": "float"}
    config = compressed(weights, "float-quantized", input_activations=inputs)
    return Format(config, float8(block, static=static))


def float8_blocks(block: tuple[int, int] = (32, 16)) -> Format:
    """Blocks with their scales, as Qwen and DeepSeek publish them."""
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
              "weight_block_size": list(block)}  # fmt: skip
    return Format(config, float8(block, "weight_scale_inv"))


def float8_tensors() -> Format:
    """One scale a tensor, and one of its inputs."""
    config = {"quant_method": "fp8", "activation_scheme": "static"}
    return Format(config, float8(None, static=True))


FORMATS: dict[str, Format] = {
    "packed": packed(),
    "packed-asymmetric": packed(symmetric=False),
    "packed-channel": packed(group=None),
    "packed-int8": packed(bits=8),
    "packed-order": packed(scattered=True),
    "gptq": gptq(),
    "gptq-asymmetric": gptq(symmetric=False),
    "gptq-v2": gptq(symmetric=False, version="gptq_v2"),
    "gptq-int8": gptq(bits=8),
    "gptq-channel": gptq(group=-1),
    "gptq-order": gptq(scattered=True, symmetric=False),
    "awq": awq(),
    "int8": int8(),
    "int8-asymmetric": int8(symmetric=False),
    "int8-tensor": int8(channel=False, static=True),
    "fp8-channel": compressed_float8("channel"),
    "fp8-tensor": compressed_float8("tensor", static=True),
    "fp8-ct-block": compressed_float8("block"),
    "fp8-block": float8_blocks(),
    "fp8-ragged-block": float8_blocks((48, 48)),
    "fp8-static": float8_tensors(),
}
