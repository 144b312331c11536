"""A small model in the shape of a larger one: its answers, at the cost of the larger one.

    python -m bench.compare.widened --shape qwen3-8b FOLDER [--model FOLDER]

Speculation pays by what a model says, so random weights cannot show it. Here the small model's
numbers are in a corner of each weight. The rest is random where it meets zeros only, else zero.
What differs from the small model is rounding.
"""

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.harness.checkpoints import SHAPES, CheckpointShape
from default_model.folder import ensure

SPREAD = 0.02  # of random weights


@dataclass(frozen=True, slots=True)
class _Heads:
    """Where the small model's heads are in the larger one's, as indices of rows."""

    q: Tensor
    kv: Tensor
    q_scale: float  # scores are divided by the root of the head's size

    @classmethod
    def of(cls, small: Mapping[str, int], shape: CheckpointShape) -> "_Heads":
        """Pairs of dimensions that turn by the same angle are at `2 i` of a head twice as large."""
        num_q, num_kv = small["num_attention_heads"], small["num_key_value_heads"]
        dim = small["hidden_size"] // num_q
        step, group = shape.head_dim // dim, num_q // num_kv
        ratio = shape.num_heads // shape.num_kv_heads
        if shape.head_dim % dim or ratio < group or shape.num_kv_heads < num_kv:
            raise ValueError(f"{num_q} and {num_kv} heads of {dim} do not fit in {shape}")
        half = torch.arange(dim // 2) * step
        dims = torch.cat([half, half + shape.head_dim // 2])
        heads = torch.arange(num_q)
        q_heads = heads // group * ratio + heads % group
        rows = (q_heads[:, None] * shape.head_dim + dims).flatten()
        kv_rows = (torch.arange(num_kv)[:, None] * shape.head_dim + dims).flatten()
        return cls(rows, kv_rows, math.sqrt(step))


def widened(folder: Path, where: Path, name: str) -> Path:
    """Writes the Llama model of a folder in a shape's size, in bfloat16; returns `where`."""
    shape, small = SHAPES[name], json.loads((folder / "config.json").read_text())
    where.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.suffix not in (".safetensors", ".gguf") and file.name != "config.json":
            shutil.copy(file, where)
    (where / "config.json").write_text(json.dumps(_config(small, shape), indent=1))
    tensors = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    weight_map: dict[str, str] = {}
    for index, part in enumerate(_parts(tensors, small, shape)):
        file_name = f"part-{index}.safetensors"
        save_file({key: tensor.cpu() for key, tensor in part.items()}, where / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    index_json = {"metadata": {}, "weight_map": weight_map}
    (where / "model.safetensors.index.json").write_text(json.dumps(index_json))
    return where


def _config(small: Mapping[str, object], shape: CheckpointShape) -> dict[str, object]:
    share = float(str(small["hidden_size"])) / shape.hidden_size
    return {
        **small,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": float(str(small["rms_norm_eps"])) * share,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def _parts(
    tensors: Mapping[str, Tensor], small: Mapping[str, int], shape: CheckpointShape
) -> Iterator[dict[str, Tensor]]:
    """Names and tensors of each file; layers beyond those of the small model add nothing."""
    hidden, heads = torch.arange(small["hidden_size"]), _Heads.of(small, shape)
    inner = torch.arange(small["intermediate_size"])
    q_size, kv_size = (n * shape.head_dim for n in (shape.num_heads, shape.num_kv_heads))
    width, wide = shape.hidden_size, shape.intermediate_size
    # A mean of squares over more dimensions is smaller by this.
    norm_scale = math.sqrt(small["hidden_size"] / width)
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    tokens = torch.arange(len(head))

    def norm(name: str) -> Tensor:
        return _placed(tensors[name][:, None] * norm_scale, (width, 1), hidden, None)[:, 0]

    yield {
        "model.embed_tokens.weight": _placed(
            tensors["model.embed_tokens.weight"], (len(head), width), tokens, hidden
        ),
        "lm_head.weight": _placed(head, (len(head), width), tokens, hidden, free="columns"),
        "model.norm.weight": norm("model.norm.weight"),
    }
    for layer in range(shape.num_layers):
        is_real = layer < small["num_hidden_layers"]
        prefix = f"model.layers.{layer if is_real else 0}."
        adds = float(is_real)
        of = {name.removeprefix(prefix): tensors[name] for name in tensors if prefix in name}
        q, o = of["self_attn.q_proj.weight"] * heads.q_scale, of["self_attn.o_proj.weight"] * adds
        down = of["mlp.down_proj.weight"] * adds
        found = {
            "self_attn.q_proj": _placed(q, (q_size, width), heads.q, hidden, free="columns"),
            "self_attn.o_proj": _placed(o, (width, q_size), hidden, heads.q),
            "mlp.down_proj": _placed(down, (width, wide), hidden, inner),
        }
        for one, rows, size in (
            ("self_attn.k_proj", heads.kv, kv_size),
            ("self_attn.v_proj", heads.kv, kv_size),
            ("mlp.gate_proj", inner, wide),
            ("mlp.up_proj", inner, wide),
        ):
            weight = of[f"{one}.weight"]
            found[one] = _placed(weight, (size, width), rows, hidden, free="all")
        norms = ("input_layernorm", "post_attention_layernorm")
        found |= {one: norm(f"{prefix}{one}.weight") for one in norms}
        yield {f"model.layers.{layer}.{one}.weight": tensor for one, tensor in found.items()}


def _placed(
    small: Tensor,
    size: tuple[int, int],
    rows: Tensor,
    columns: Tensor | None,
    free: str = "",
) -> Tensor:
    """The small weight in a larger one; `free`: where that may be random, `columns` or `all`.

    Free columns meet inputs that are zero; free rows give outputs that nothing reads.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    large = torch.zeros(size, device=device)
    if free:
        large.normal_(std=SPREAD)
    at = torch.arange(size[1]) if columns is None else columns
    if free == "columns":
        large[:, at.to(device)] = 0.0
    large[rows.to(device)[:, None], at.to(device)] = small.float().to(device)
    return large.to(torch.bfloat16)


def main(arguments: Sequence[str]) -> int:
    """Writes a checkpoint."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare.widened", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--model", type=Path, help="a folder (default: the default model)")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    widened(options.model or ensure(), options.folder, options.shape)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
