"""Random checkpoints of real shapes for benchmarks: speed does not depend on what a model knows.

python -m bench.harness.checkpoints --shape qwen3-8b [--int4-group 128] FOLDER
"""

import contextlib
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.harness import configs
from bench.harness.records import new_parser


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """The experts of each layer, in place of its MLP."""

    num_experts: int
    top_k: int
    intermediate_size: int


@dataclass(frozen=True, slots=True)
class CheckpointShape:
    """A Qwen3 of some size."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    is_tied: bool
    experts: ExpertsShape | None = None


SILENT = ("o_proj.weight", "down_proj.weight")  # where these are 0, a layer adds nothing
SHAPES = {
    "qwen3-0.6b": CheckpointShape(1024, 3072, 28, 16, 8, 128, 151_936, is_tied=True),
    "qwen3-8b": CheckpointShape(4096, 12_288, 36, 32, 8, 128, 151_936, is_tied=False),
    "qwen3-30b-a3b": CheckpointShape(
        2048, 6144, 48, 32, 4, 128, 151_936, is_tied=False, experts=ExpertsShape(128, 8, 768)
    ),
    "tiny": CheckpointShape(64, 128, 2, 4, 2, 16, 16_384, is_tied=True),
    "tiny-chat": CheckpointShape(64, 128, 2, 4, 2, 16, 49_152, is_tied=False),  # of the tokenizer
}
NAMES = (*SHAPES, *configs.CONFIGS)  # the latter are no checkpoints that `write` writes


SHARED_MEMORY = Path("/dev/shm")
BYTES_PER_WEIGHT = 2


@contextlib.contextmanager
def temporary(name: str, num_layers: int = 0) -> Iterator[Path]:
    """A model folder of a shape, deleted after the block; 0 layers: all of them."""
    with room(name) as folder:
        yield write(folder, name, num_layers)


@contextlib.contextmanager
def room(name: str) -> Iterator[Path]:
    """An empty folder for a shape's checkpoint, in memory if it fits."""
    fits = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > _num_bytes(name) * 1.1
    where = SHARED_MEMORY if fits else None
    with tempfile.TemporaryDirectory(prefix="pagewire-bench-", dir=where) as folder:
        yield Path(folder)


def describe(folder: Path, name: str, num_layers: int = 0) -> Path:
    """Writes the config.json of a shape alone, for workers with random weights of their own."""
    (folder / "config.json").write_text(json.dumps(config_of(name, num_layers), indent=1))
    return folder


def config_of(name: str, num_layers: int = 0) -> dict[str, object]:
    """The config.json of a shape, one of NAMES; 0 layers: all of them."""
    if name not in SHAPES:
        return configs.config_of(name, num_layers)
    shape = SHAPES[name]
    return _config(replace(shape, num_layers=num_layers) if num_layers else shape)


def vocab_size_of(name: str) -> int:
    """The vocabulary of a shape, one of NAMES."""
    vocab_size = config_of(name)["vocab_size"]
    assert isinstance(vocab_size, int)
    return vocab_size


def write(folder: Path, name: str, num_layers: int = 0, int4_group: int = 0) -> Path:
    """Writes a model folder of a shape in bfloat16, one file per layer; 0 layers: all of them.

    With `int4_group`, layers' weights have 4 bits, and a scale for so many columns.
    """
    shape = SHAPES[name]
    if num_layers:
        shape = replace(shape, num_layers=num_layers)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    config = _config(shape) | (_packed_config(int4_group) if int4_group else {})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    weight_map: dict[str, str] = {}
    for index, part in enumerate(_parts(shape)):
        file = f"part-{index}.safetensors"
        tensors: dict[str, Tensor] = {}
        for key, size in part.items():
            if int4_group and key.endswith("_proj.weight"):
                tensors |= _packed(key, size, int4_group, device, generator)
            else:
                tensors[key] = _random(size, device, generator)
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    index_json = json.dumps(
        {"metadata": {}, "weight_map": weight_map}
    )  # the first for transformers
    (folder / "model.safetensors.index.json").write_text(index_json)
    return folder


def _num_bytes(name: str) -> int:
    sizes = (size for part in _parts(SHAPES[name]) for size in part.values())
    return sum(BYTES_PER_WEIGHT * math.prod(size) for size in sizes)


def _random(size: tuple[int, ...], device: str, generator: torch.Generator) -> Tensor:
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    weight = torch.randn(size, device=device, generator=generator) * 0.02
    return weight.to(torch.bfloat16).cpu()


def _packed(
    name: str, size: tuple[int, ...], group: int, device: str, generator: torch.Generator
) -> dict[str, Tensor]:
    """A weight [N, K] as compressed-tensors packs it: 8 integers in a word, around 8."""
    n, k = size
    limits = torch.iinfo(torch.int32)
    words = torch.randint(
        limits.min, limits.max, (n, k // 8), dtype=torch.int32, device=device, generator=generator
    )
    # The integers' standard deviation is 4.6, and the weights' that of plain ones.
    scales = torch.rand((n, k // group), device=device, generator=generator) * 0.001 + 0.0038
    return {
        f"{name}_packed": words.cpu(),
        f"{name}_scale": scales.to(torch.bfloat16).cpu(),
        f"{name}_shape": torch.tensor(size),
    }


def _packed_config(group: int) -> dict[str, object]:
    weights = {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "symmetric": True,
    }  # fmt: skip
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["lm_head"],
        }
    }


def _config(shape: CheckpointShape) -> dict[str, object]:
    return _kind(shape) | {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.is_tied,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 40_960,
        "torch_dtype": "bfloat16",
        "eos_token_id": shape.vocab_size - 1,
    }


def _kind(shape: CheckpointShape) -> dict[str, object]:
    """The architecture, and its keys for experts."""
    if shape.experts is None:
        return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": shape.experts.num_experts,
        "num_experts_per_tok": shape.experts.top_k,
        "moe_intermediate_size": shape.experts.intermediate_size,
        "norm_topk_prob": True,
    }


def _parts(shape: CheckpointShape) -> Iterator[dict[str, tuple[int, ...]]]:
    """Names and sizes of the tensors of each file."""
    hidden = shape.hidden_size
    q_size, kv_size = (n * shape.head_dim for n in (shape.num_heads, shape.num_kv_heads))
    ends = {
        "model.embed_tokens.weight": (shape.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    yield ends if shape.is_tied else ends | {"lm_head.weight": (shape.vocab_size, hidden)}
    for layer in range(shape.num_layers):
        sizes: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (q_size, hidden),
            "self_attn.k_proj": (kv_size, hidden),
            "self_attn.v_proj": (kv_size, hidden),
            "self_attn.o_proj": (hidden, q_size),
            "self_attn.q_norm": (shape.head_dim,),
            "self_attn.k_norm": (shape.head_dim,),
            "post_attention_layernorm": (hidden,),
            **_feed(shape),
        }
        yield {f"model.layers.{layer}.{name}.weight": size for name, size in sizes.items()}


def _feed(shape: CheckpointShape) -> dict[str, tuple[int, ...]]:
    """A layer's MLP, or its router and experts."""
    hidden, experts = shape.hidden_size, shape.experts
    if experts is None:
        return _mlp("mlp", hidden, shape.intermediate_size)
    sizes: dict[str, tuple[int, ...]] = {"mlp.gate": (experts.num_experts, hidden)}
    for index in range(experts.num_experts):
        sizes |= _mlp(f"mlp.experts.{index}", hidden, experts.intermediate_size)
    return sizes


def _mlp(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj": (inner, hidden),
        f"{prefix}.up_proj": (inner, hidden),
        f"{prefix}.down_proj": (hidden, inner),
    }


def deepened(folder: Path, where: Path, times: int, max_model_len: int) -> Path:
    """Writes the model of a folder with so many times its layers; returns `where`.

    The new ones add nothing: it is as slow as a larger model, with the same outputs.
    """
    where.mkdir(parents=True)
    for file in folder.iterdir():
        if file.suffix not in (".safetensors", ".gguf") and file.name != "config.json":
            shutil.copy(file, where)
    config = json.loads((folder / "config.json").read_text())
    num_layers = config["num_hidden_layers"]
    config["num_hidden_layers"] = times * num_layers
    config["max_position_embeddings"] = max_model_len
    (where / "config.json").write_text(json.dumps(config))
    tensors = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    first = {k: v for k, v in tensors.items() if k.startswith("model.layers.0.")}
    for layer in range(num_layers, times * num_layers):
        for name, tensor in first.items():
            copy = tensor.clone()
            if name.endswith(SILENT):
                copy.zero_()
            tensors[name.replace("layers.0.", f"layers.{layer}.")] = copy
    save_file(tensors, where / "model.safetensors", metadata={"format": "pt"})
    return where


def main(arguments: Sequence[str]) -> int:
    """Writes a checkpoint."""
    parser = new_parser("bench.harness.checkpoints", __doc__)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    add, of_int4 = parser.add_argument, "4 bits a weight, a scale for so many columns"
    add("--int4-group", type=int, default=0, help=of_int4)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    write(options.folder, options.shape, int4_group=options.int4_group)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
