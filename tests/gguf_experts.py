"""GGUF files of models with experts, as llama.cpp's converter would write them."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.gguf_files import NUM_TOKENS, GgufFile, packed, permuted, sizes, vocabulary

NUM_EXPERTS, PER_TOKEN, EXPERT_SIZE = 4, 2, 256
SIZES: dict[str, Any] = {
    "vocab_size": NUM_TOKENS,
    "hidden_size": 256,  # a block of the K types
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "num_experts_per_tok": PER_TOKEN,
    "pad_token_id": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
QWEN: dict[str, Any] = {
    "intermediate_size": 512,
    "moe_intermediate_size": EXPERT_SIZE,
    "num_experts": NUM_EXPERTS,
    "norm_topk_prob": True,
    "rope_parameters": PLAIN,
}
MIXTRAL: dict[str, Any] = {
    "intermediate_size": EXPERT_SIZE,
    "num_local_experts": NUM_EXPERTS,
    "sliding_window": None,
    "rope_parameters": PLAIN,
}
GPT_OSS: dict[str, Any] = {
    "intermediate_size": EXPERT_SIZE,
    "num_local_experts": NUM_EXPERTS,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": YARN,
}
FAMILIES: dict[str, tuple[type[Any], type[PreTrainedModel], dict[str, Any]]] = {
    "qwen3moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, QWEN),
    "llama": (MixtralConfig, MixtralForCausalLM, MIXTRAL),
    "gpt-oss": (GptOssConfig, GptOssForCausalLM, GPT_OSS),
}
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
}
TypeOf = Callable[[str], str]


def random_model(name: str, **changes: Any) -> PreTrainedModel:
    """A seeded model; norms, biases and sinks are random, too."""
    torch.manual_seed(0)
    of_config, of_model, more = FAMILIES[name]
    model: PreTrainedModel = of_model(of_config(**(SIZES | more | changes))).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "norm" in path:
                parameter.uniform_(0.5, 1.5)
            elif path.endswith(("bias", "sinks")):
                parameter.normal_(std=0.2)
    return model


def file_of(model: PreTrainedModel, name: str, type_of: TypeOf = lambda stored: "F32") -> GgufFile:
    """The file of a model, its matrices in the types that their names are given."""
    config = model.config.to_dict()
    file = GgufFile(name, metadata(name, config) | vocabulary())
    for path, parameter in model.state_dict().items():
        for stored, values in as_stored(name, path, parameter, config).items():
            is_matrix = stored.endswith(".weight") and values.ndim > 1
            file.tensors[stored] = packed(values, type_of(stored) if is_matrix else "F32")
    return file


def metadata(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the architecture."""
    rotation = config["rope_parameters"]
    told = sizes(name, {**config, "rope_theta": rotation["rope_theta"]})
    more: dict[str, Any] = {"expert_count": NUM_EXPERTS, "expert_used_count": PER_TOKEN}
    if name != "llama":
        more["expert_feed_forward_length"] = EXPERT_SIZE
    if name == "gpt-oss":
        more |= {
            "attention.sliding_window": config["sliding_window"],
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rotation["factor"],
            "rope.scaling.original_context_length": rotation["original_max_position_embeddings"],
        }
    return told | {f"{name}.{key}": value for key, value in more.items()}


def as_stored(
    name: str, path: str, parameter: Tensor, config: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """The tensors of a file that hold a parameter."""
    values = parameter.float()
    if path in OUTER:
        return {OUTER[path]: values.numpy()}
    _, _, layer, kind = path.split(".", 3)
    if kind.startswith("mlp.experts."):
        parts = experts_of(kind.removeprefix("mlp.experts."), values, name == "gpt-oss")
        return {f"blk.{layer}.{part}": each.numpy() for part, each in parts.items()}
    if kind == "self_attn.sinks":
        return {f"blk.{layer}.attn_sinks.weight": values.numpy()}
    kind, _, end = kind.rpartition(".")
    array = values.numpy()
    if name == "llama" and kind in ("self_attn.q_proj", "self_attn.k_proj"):
        key = "num_attention_heads" if kind.endswith("q_proj") else "num_key_value_heads"
        array = permuted(array, config[key])
    stored = LAYER[kind]
    if name == "gpt-oss" and stored == "ffn_norm":
        stored = "post_attention_norm"
    return {f"blk.{layer}.{stored}.{end}": array}


def experts_of(kind: str, values: Tensor, alternates: bool) -> dict[str, Tensor]:
    """Gate, up and down of all experts, apart and with a row for each output."""
    is_bias = kind.endswith("_bias")
    end = "bias" if is_bias else "weight"
    if alternates and not is_bias:
        values = values.transpose(1, 2)  # [E, outputs, inputs]
    if kind.startswith("down"):
        return {f"ffn_down_exps.{end}": values}
    gate, up = (values[:, 0::2], values[:, 1::2]) if alternates else values.chunk(2, 1)
    return {f"ffn_gate_exps.{end}": gate, f"ffn_up_exps.{end}": up}


def dequantized(model: PreTrainedModel, name: str, file: GgufFile) -> PreTrainedModel:
    """The model with the numbers that the `gguf` package reads from its file."""
    config, state = model.config.to_dict(), {}
    for path, parameter in model.state_dict().items():
        assert parameter.numel() < 1 << 24  # so that float32 holds each place
        places = torch.arange(parameter.numel()).view(parameter.shape)
        filled = torch.empty(parameter.numel())
        for stored, at in as_stored(name, path, places, config).items():
            numbers = torch.from_numpy(file.tensors[stored].values)
            filled[torch.from_numpy(at).long().flatten()] = numbers.flatten()
        state[path] = filled.view(parameter.shape)
    model.load_state_dict(state)
    return model
