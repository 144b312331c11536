"""Configurations of real shapes that are no Qwen3, as their config.json has them.

Workers make random weights of them; no checkpoint is written.
"""

from typing import Any

# Of every shape: outputs end by their length alone.
PLAIN: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "dtype": "bfloat16"}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "attention_bias": True,
    "hidden_act": "silu",
    "swiglu_limit": 7.0,
    "rms_norm_eps": 1e-5,
    "rope_parameters": _YARN,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
}
_MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
_QWEN_3_5: dict[str, Any] = {
    "vocab_size": 248_320,
    "num_attention_heads": 16,
    "head_dim": 256,
    "hidden_act": "silu",
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "partial_rotary_factor": 0.25,
        "rope_theta": 10_000_000.0,
        "rope_type": "default",
    },
    "tie_word_embeddings": False,
}
_GEMMA_4 = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "vocab_size": 262_144,
    "vocab_size_per_layer_input": 262_144,
    "head_dim": 256,
    "global_head_dim": 512,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": _GPT_OSS_20B,
    "gpt-oss-20b-mxfp4": _GPT_OSS_20B | {"quantization_config": _MXFP4},
    "gemma-3-4b": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 262_208,
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "sliding_window": 1024,
        "layer_types": [
            "sliding_attention" if (index + 1) % 6 else "full_attention" for index in range(34)
        ],
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
    },
    "gemma-4-26b-a4b": _GEMMA_4
    | {
        "hidden_size": 2816,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
        "max_position_embeddings": 262_144,
    },
    "gemma-4-e4b": _GEMMA_4
    | {
        "hidden_size": 2560,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 10_240,
        "num_hidden_layers": 42,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 18,
        "sliding_window": 512,
        "max_position_embeddings": 131_072,
    },
    "qwen3.5-9b": _QWEN_3_5
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
    "qwen3.5-35b-a3b": _QWEN_3_5
    | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 512,
    },
}


def config_of(name: str, num_layers: int = 0) -> dict[str, Any]:
    """The config.json of a shape; 0 layers: all of them."""
    config = PLAIN | CONFIGS[name]
    if num_layers:
        config["num_hidden_layers"] = num_layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:num_layers]
    return config
