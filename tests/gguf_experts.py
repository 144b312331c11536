"""GGUF files of models with experts and of hybrids, as llama.cpp's converter would write them."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
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
QWEN2: dict[str, Any] = {
    "intermediate_size": 512,
    "moe_intermediate_size": EXPERT_SIZE,
    "shared_expert_intermediate_size": 2 * EXPERT_SIZE,
    "num_experts": NUM_EXPERTS,
    "norm_topk_prob": False,
    "rope_parameters": PLAIN,
}
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "intermediate_size": 512,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 12,
    "rope_parameters": {
        **PLAIN,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
    },
}
HYBRID_MOE: dict[str, Any] = {
    **HYBRID,
    "moe_intermediate_size": EXPERT_SIZE,
    "shared_expert_intermediate_size": EXPERT_SIZE,
    "num_experts": NUM_EXPERTS,
}
FAMILIES: dict[str, tuple[type[Any], type[PreTrainedModel], dict[str, Any]]] = {
    "qwen3moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, QWEN),
    "llama": (MixtralConfig, MixtralForCausalLM, MIXTRAL),
    "gpt-oss": (GptOssConfig, GptOssForCausalLM, GPT_OSS),
    "qwen2moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM, QWEN2),
    "qwen35moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, HYBRID_MOE),
}
LFM2: dict[str, Any] = {
    "num_hidden_layers": 4,
    "intermediate_size": 512,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "block_auto_adjust_ff_dim": False,
    "conv_L_cache": 3,
    "norm_eps": 1e-5,
    "rope_parameters": PLAIN,
}
HYBRIDS: dict[str, tuple[type[Any], type[PreTrainedModel], dict[str, Any]]] = {
    "qwen35": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, HYBRID),
    "qwen35moe": FAMILIES["qwen35moe"],
}
LFM2S = {"lfm2": (Lfm2Config, Lfm2ForCausalLM, LFM2)}
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.embedding_norm.weight": "token_embd_norm.weight",
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
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    # Of LFM2:
    "operator_norm": "attn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
}
DELTA_NET = {
    "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight",
    "in_proj_a.weight": "ssm_alpha.weight",
    "in_proj_b.weight": "ssm_beta.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias",
}
TypeOf = Callable[[str], str]


def random_model(name: str, **changes: Any) -> PreTrainedModel:
    """A seeded model; norms, biases and sinks are random, too."""
    torch.manual_seed(0)
    of_config, of_model, more = (FAMILIES | HYBRIDS | LFM2S)[name]
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
            is_matrix &= not stored.endswith(("ssm_conv1d.weight", "shortconv.conv.weight"))
            values = meant(name, stored, values)
            file.tensors[stored] = packed(values, type_of(stored) if is_matrix else "F32")
    return file


def metadata(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the architecture."""
    rotation = config["rope_parameters"]
    norm = {"rms_norm_eps": config.get("norm_eps"), "intermediate_size": 512}
    told = sizes(name, {**norm, "head_dim": 64, **config, "rope_theta": rotation["rope_theta"]})
    more: dict[str, Any] = {}
    if name in HYBRIDS:
        more |= hybrid_metadata(config)
    if name == "lfm2":
        heads = config["num_key_value_heads"]
        kinds = config["layer_types"]
        more["attention.head_count_kv"] = [heads * (kind != "conv") for kind in kinds]
        more["shortconv.l_cache"] = config["conv_L_cache"]
    if name not in ("qwen35", "lfm2"):
        more |= {"expert_count": NUM_EXPERTS, "expert_used_count": PER_TOKEN}
    if name in ("qwen2moe", "qwen35moe"):
        more["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    if name not in ("llama", "qwen35", "lfm2"):
        more["expert_feed_forward_length"] = EXPERT_SIZE
    if name == "gpt-oss":
        more |= {
            "attention.sliding_window": config["sliding_window"],
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rotation["factor"],
            "rope.scaling.original_context_length": rotation["original_max_position_embeddings"],
        }
    return told | {f"{name}.{key}": value for key, value in more.items()}


def hybrid_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    heads = config["linear_num_value_heads"]
    rotation = config["rope_parameters"]
    return {
        "rope.dimension_count": int(config["head_dim"] * rotation["partial_rotary_factor"]),
        "rope.dimension_sections": [*rotation["mrope_section"], 0],
        "full_attention_interval": 2,
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * config["linear_value_head_dim"],
    }


def meant(name: str, stored: str, values: np.ndarray, back: bool = False) -> np.ndarray:
    """The numbers that a file has in place of a parameter's, or the other way round."""
    if name not in HYBRIDS:
        return values
    if stored.endswith("ssm_a"):
        return np.log(-values) if back else -np.exp(values)
    if stored.endswith("norm.weight") and not stored.endswith("ssm_norm.weight"):
        return values - 1 if back else values + 1
    return values


def delta_net(kind: str, values: Tensor, config: Mapping[str, Any]) -> Tensor:
    """A parameter with the value heads of all key heads in turn: the first of each, and so on."""
    num_keys, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    value_dim = config["linear_value_head_dim"]
    if kind == "norm.weight":
        return values
    if kind == "out_proj.weight":
        return delta_net("in_proj_z.weight", values.T, config).T
    size = value_dim if kind in ("in_proj_qkv.weight", "in_proj_z.weight", "conv1d.weight") else 1
    begin = 2 * num_keys * key_dim if kind in ("in_proj_qkv.weight", "conv1d.weight") else 0
    values = values.squeeze(1) if kind == "conv1d.weight" else values
    heads = values[begin:].unflatten(0, (num_keys, -1, size)).transpose(0, 1)
    return torch.cat((values[:begin], heads.flatten(0, 2)))


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
    if kind.startswith("linear_attn."):
        kind = kind.removeprefix("linear_attn.")
        values = delta_net(kind, values, config)
        return {f"blk.{layer}.{DELTA_NET[kind]}": values.contiguous().numpy()}
    if kind == "conv.conv.weight":
        values = values.squeeze(1)
    if kind == "mlp.shared_expert_gate.weight":
        values = values[0]
    kind, _, end = kind.rpartition(".")
    array = values.numpy()
    if name == "llama" and kind in ("self_attn.q_proj", "self_attn.k_proj"):
        key = "num_attention_heads" if kind.endswith("q_proj") else "num_key_value_heads"
        array = permuted(array, config[key])
    stored = LAYER[kind]
    if name in ("gpt-oss", *HYBRIDS) and stored == "ffn_norm":
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
            numbers = torch.from_numpy(meant(name, stored, file.tensors[stored].values, back=True))
            filled[torch.from_numpy(at).long().flatten()] = numbers.flatten()
        state[path] = filled.view(parameter.shape)
    model.load_state_dict(state)
    return model
