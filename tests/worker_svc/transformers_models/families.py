"""Tiny checkpoints of many families, made by transformers' own classes with random weights."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

VOCAB_SIZE = 128
WINDOW = 8  # of the layers that have one, in tokens
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
_LATENT = {
    **_EXPERTS,
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
    "head_dim": None,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "layer_types": [LINEAR, LINEAR, FULL],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
    },
}
_WINDOWS = {"sliding_window": WINDOW, "layer_types": [SLIDING, SLIDING, FULL]}

# By name: the model_type, and what differs from the common sizes; None: the class's own default.
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "gemma2": (
        "gemma2",
        {**_WINDOWS, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0},
    ),
    "gemma3": ("gemma3_text", {**_WINDOWS, "query_pre_attn_scalar": 20}),
    "gemma4": (
        "gemma4_text",
        {
            **_WINDOWS,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
            "per_layer_config": {"1": {"head_dim": 24}, "3": {"head_dim": 24}},
        },
    ),
    "ministral3": (
        "ministral3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.1,
            }
        },
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", _WINDOWS),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 3}),
    "cohere2": ("cohere2", {**_WINDOWS, "logit_scale": 0.5}),
    "opt": (
        "opt",
        {
            "ffn_dim": 64,
            "word_embed_proj_dim": 48,
            "intermediate_size": None,
            "num_key_value_heads": None,
            "head_dim": None,
        },
    ),
}
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("qwen3_moe", {**_EXPERTS, "num_experts": 4, "mlp_only_layers": [0]}),
    "qwen2_moe": (
        "qwen2_moe",
        {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 48},
    ),
    "dots1": (
        "dots1",
        {
            **_EXPERTS,
            "n_routed_experts": 4,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": True,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {**_WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gemma4_moe": (
        "gemma4_text",
        {
            **_WINDOWS,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_experts": 4,
            "enable_moe_block": True,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
            "num_global_key_value_heads": 1,
            "per_layer_config": {"2": {"head_dim": 24}},
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {**_LATENT, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "glm4_moe": (
        "glm4_moe",
        {**_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "use_qk_norm": True},
    ),
    "glm4_moe_lite": ("glm4_moe_lite", _LATENT),
    "minimax_m2": ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama4": (
        "llama4_text",
        {
            "num_local_experts": 4,
            "intermediate_size_mlp": 64,
            "attention_chunk_size": WINDOW,
            "moe_layers": [1],
            "interleave_moe_layer_step": 2,
        },
    ),
}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": (
        "qwen3_next",
        {**_EXPERTS, **_DELTA, "num_experts": 4, "shared_expert_intermediate_size": 24},
    ),
    "qwen3_5": ("qwen3_5_text", _DELTA),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {**_EXPERTS, **_DELTA, "num_experts": 4, "shared_expert_intermediate_size": 24},
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            **_EXPERTS,
            "num_hidden_layers": None,
            "layers_block_type": [LINEAR, "moe", FULL, "mlp"],
            "ssm_state_size": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "chunk_size": 16,
            "n_routed_experts": 4,
            "moe_shared_expert_intermediate_size": 24,
        },
    ),
    "lfm2": (
        "lfm2",
        {"layer_types": ["conv", FULL, "conv"], "block_auto_adjust_ff_dim": False},
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {
            **_EXPERTS,
            "layer_types": ["conv", FULL, "conv"],
            "num_dense_layers": 1,
            "num_experts": 4,
        },
    ),
    "granite_hybrid": (
        "granitemoehybrid",
        {
            "layer_types": [LINEAR, FULL, LINEAR],
            "intermediate_size": 24,
            "shared_intermediate_size": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": None,
            "mamba_n_heads": 4,
            "mamba_n_groups": 2,
            "mamba_d_state": 8,
            "mamba_chunk_size": 16,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "position_embedding_type": "nope",
        },
    ),
}
_EYES = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 48,
    "patch_size": 4,
}
# Models of text and pictures, of which the text is served.
WITH_PICTURES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": (
        "qwen3_vl",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 2, 2],
            }
        },
        {**_EYES, "deepstack_visual_indexes": [0, 1]},
    ),
    "qwen3_5_vl": (
        "qwen3_5",
        {
            **_DELTA,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [1, 1, 1],
                "partial_rotary_factor": 0.5,
            },
        },
        _EYES,
    ),
    "gemma3_vl": (
        "gemma3",
        {**_WINDOWS, "query_pre_attn_scalar": 20},
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
        },
    ),
}
_OTHER_DRAWS = {"cohere2": 1, "lfm2": 1}  # where the first draw has no clear winners
TEXT = DENSE | EXPERTS | HYBRIDS
NAMES = [*TEXT, *WITH_PICTURES]
# That layers of ours compute, too.
NATIVE_HYBRIDS = (
    "granite_hybrid",
    "lfm2",
    "lfm2_moe",
    "nemotron_h",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_vl",
    "qwen3_next",
)


def write(name: str, folder: Path, sizes: dict[str, Any] | None = None) -> Path:
    """Writes the family's checkpoint in float32, with some of the common sizes changed."""
    torch.manual_seed(sum(name.encode()) + _OTHER_DRAWS.get(name, 0))
    if name in WITH_PICTURES:
        kind, text, eyes = WITH_PICTURES[name]
        config = AutoConfig.for_model(
            kind, text_config=_sizes(text, sizes), vision_config=eyes, tie_word_embeddings=False
        )
        model = AutoModelForImageTextToText.from_config(config)
    else:
        kind, changes = TEXT[name]
        config = AutoConfig.for_model(kind, **_sizes(changes, sizes))
        model = AutoModelForCausalLM.from_config(config)
    model.float().save_pretrained(folder)
    return folder


def _sizes(changes: dict[str, Any], sizes: dict[str, Any] | None) -> dict[str, Any]:
    given = _COMMON | (sizes or {}) | changes
    return {key: value for key, value in given.items() if value is not None or key.endswith("_id")}


class Oracle:
    """Greedy tokens of a checkpoint by transformers itself."""

    def __init__(self, name: str, folder: Path) -> None:
        auto = AutoModelForImageTextToText if name in WITH_PICTURES else AutoModelForCausalLM
        self._model = auto.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
        config = self._model.config.get_text_config()
        config._experts_implementation = "eager"
        self.smallest_lead = float("inf")  # of a chosen token's logit over the next

    @torch.inference_mode()
    def __call__(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The tokens after a prompt."""
        ids = torch.tensor([prompt])
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        best = torch.stack(output.logits)[:, 0].topk(2).values
        lead = float((best[:, 0] - best[:, 1]).min())
        self.smallest_lead = min(self.smallest_lead, lead)
        tokens: list[int] = output.sequences[0, len(prompt) :].tolist()
        return tokens
