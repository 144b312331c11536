"""Adapters in PEFT's format with random weights, and models that they are merged into."""

import copy
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class MadeAdapter:
    """An adapter of which every module may have a rank and an alpha of its own."""

    modules: tuple[str, ...] = ALL_LINEAR
    rank: int = 8
    alpha: float = 16.0
    is_rank_stabilized: bool = False
    ranks: dict[str, int] = field(default_factory=dict)  # by the end of a module's name
    alphas: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    gain: float = 1.0  # of B

    def rank_of(self, module: str) -> int:
        return next((one for end, one in self.ranks.items() if module.endswith(end)), self.rank)

    def scale_of(self, module: str) -> float:
        rank = self.rank_of(module)
        alpha = next((one for end, one in self.alphas.items() if module.endswith(end)), self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)

    def pairs(self, model: PreTrainedModel) -> Iterator[tuple[str, Tensor, Tensor]]:
        """The name of each module that it adapts, A and B."""
        generator = torch.Generator().manual_seed(self.seed)
        for name, linear in model.named_modules():
            if isinstance(linear, torch.nn.Linear) and name.endswith(self.modules):
                (n, k), rank = linear.weight.shape, self.rank_of(name)
                a = torch.randn(rank, k, generator=generator) * k**-0.5
                b = torch.randn(n, rank, generator=generator) * self.gain * rank**-0.5
                yield name, a, b

    def save(self, model: PreTrainedModel, folder: Path, **config: Any) -> Path:
        """Writes it as PEFT does, with some keys of the configuration changed."""
        tensors = {}
        for name, a, b in self.pairs(model):
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
        given = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "use_rslora": self.is_rank_stabilized,
            "rank_pattern": self.ranks,
            "alpha_pattern": self.alphas,
            "target_modules": list(self.modules),
            "bias": "none",
            "lora_dropout": 0.0,
            "fan_in_fan_out": False,
            "base_model_name_or_path": "base",
        }
        return save_adapter(folder, tensors, given | config)

    @torch.no_grad()
    def merged(self, model: PreTrainedModel) -> PreTrainedModel:
        """A copy of the model whose weights contain it."""
        changed = copy.deepcopy(model)
        for name, a, b in self.pairs(model):
            changed.get_submodule(name).weight += self.scale_of(name) * b @ a
        return changed


def save_adapter(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    """Writes the two files of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@torch.inference_mode()
def continued(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy tokens by transformers."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


# --- a model and adapters whose weights follow from names, with tokens known from elsewhere ------

GOLDEN_BASE = "lora_base"
GOLDEN: dict[str, MadeAdapter] = {
    "lora_r8": MadeAdapter(("q_proj", "v_proj", "down_proj"), rank=8, alpha=24),
    "lora_rs16": MadeAdapter(
        ("q_proj", "v_proj", "down_proj"), rank=16, alpha=24, is_rank_stabilized=True
    ),
}
_SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
    """Standard normal numbers that depend on the name and the shape alone."""
    generator = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    return torch.from_numpy(generator.standard_normal(shape).astype(np.float32))


@torch.no_grad()
def save_golden(folder: Path) -> dict[str, Path]:
    """The folders of the model and of the adapters whose tokens are known, by name."""
    model = LlamaForCausalLM(LlamaConfig(**_SIZES)).float().eval()
    for name, weight in model.named_parameters():
        noise = drawn("b" + name, tuple(weight.shape))
        if "norm" in name:
            weight.copy_(1 + 0.2 * noise)
        elif "embed" in name:
            weight.copy_(noise)
        else:
            weight.copy_(noise * 1.5 * weight.shape[1] ** -0.5)
    found = {GOLDEN_BASE: folder / GOLDEN_BASE}
    model.save_pretrained(found[GOLDEN_BASE])
    for name, made in GOLDEN.items():
        tensors = {}
        for module, a, b in made.pairs(model):
            key = f"base_model.model.{module}.lora_"
            a_drawn = drawn(f"{name}{key}A", tuple(a.shape)) * a.shape[1] ** -0.5
            tensors[f"{key}A.weight"] = a_drawn
            tensors[f"{key}B.weight"] = drawn(f"{name}{key}B", tuple(b.shape)) * (
                0.3 * made.rank**-0.5
            )
        config = {
            "peft_type": "LORA",
            "r": made.rank,
            "lora_alpha": 24,
            "use_rslora": made.is_rank_stabilized,
            "bias": "none",
            "target_modules": list(made.modules),
            "fan_in_fan_out": False,
        }
        found[name] = save_adapter(folder / name, tensors, config)
    return found
