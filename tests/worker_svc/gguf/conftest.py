"""Small models of transformers, written as GGUF files, and what they compute."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from pagewire.gguf.architecture import ARCHITECTURES, OUTER
from tests.gguf_files import NUM_TOKENS, GgufFile, packed, permuted, sizes, vocabulary
from tests.worker_svc.random_models import Family, save_random_model

FAMILIES: dict[str, Family] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM),
}
CONFIG = {
    "vocab_size": NUM_TOKENS,
    "hidden_size": 256,  # a block of the K types
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
SWAPS_ROWS = ("llama", "smollm3")


def save(folder: Path, name: str, **changes: Any) -> PreTrainedModel:
    """A random model of an architecture, saved as a Hugging Face folder."""
    return save_random_model(folder, FAMILIES[name], CONFIG | changes)


def as_gguf(
    model: PreTrainedModel, name: str, matrices: str = "F32", vectors: str = "F32"
) -> GgufFile:
    """The file that says the same in these types, as llama.cpp's converter would write it."""
    config = CONFIG | {"num_hidden_layers": model.config.num_hidden_layers}
    file = GgufFile(name, sizes(name, config) | vocabulary())
    theirs = ARCHITECTURES[name].layer_names
    names = {ours: stored for stored, ours in theirs.items()}
    for path, parameter in model.state_dict().items():
        values = parameter.float().numpy()
        if model.config.tie_word_embeddings and path == "lm_head.weight":
            continue
        stored = {ours: outer for outer, ours in OUTER.items()}.get(path)
        if stored is None:
            _, _, layer, room, *rest, end = path.split(".")
            kind = ".".join((room, *rest))
            if name in SWAPS_ROWS and kind in ("self_attn.q_proj", "self_attn.k_proj"):
                values = permuted(values, CONFIG_HEADS[kind])
            stored = f"blk.{layer}.{names[kind]}.{end}"
        file.tensors[stored] = packed(values, matrices if values.ndim == 2 else vectors)
    return file


CONFIG_HEADS = {
    "self_attn.q_proj": CONFIG["num_attention_heads"],
    "self_attn.k_proj": CONFIG["num_key_value_heads"],
}


def dequantized(name: str, file: GgufFile) -> dict[str, torch.Tensor]:
    """The tensors of a Hugging Face folder, with the values that the `gguf` package reads."""
    names = ARCHITECTURES[name].layer_names
    state = {}
    for stored, tensor in file.tensors.items():
        values = tensor.values
        if stored in OUTER:
            state[OUTER[stored]] = torch.from_numpy(values)
            continue
        _, layer, kind, end = stored.split(".")
        if name in SWAPS_ROWS and (num_heads := CONFIG_HEADS.get(names[kind])) is not None:
            rows = permuted(np.arange(len(values)), num_heads)
            values = values[np.argsort(rows)]
        state[f"model.layers.{layer}.{names[kind]}.{end}"] = torch.from_numpy(values)
    return state


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """A random Llama."""
    return save(tmp_path_factory.mktemp("gguf") / "llama", "llama")


@pytest.fixture(scope="session")
def prompt() -> list[int]:
    """Ids that are no control tokens."""
    return [(7 * i) % 250 + 3 for i in range(40)]
