"""The known keys of a config.json, so that a new one is a refusal and not a silent error.

A key is read, or it never changes what is computed, or it does so unless its value is neutral,
which means that it asks for nothing that is not computed anyway. Any other key is refused by its
name. null asks for nothing under every key. A family adds to these tables what holds for it alone.
"""

import logging
from collections.abc import Collection, Mapping
from typing import Any

from worker_svc.models.families.family import Family

FULL_ATTENTION = "full_attention"

# Keys that are read for every family, and refused by name where they must be.
READ = frozenset(
    {
        "architectures",
        "dtype",
        "eos_token_id",
        "head_dim",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "max_position_embeddings",
        "model_type",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "quantization_config",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "tie_word_embeddings",
        "torch_dtype",
        "vocab_size",
    }
)

# Keys that never change what is computed from token ids, whatever their value.
_ORIGIN = {
    "_commit_hash",
    "_name_or_path",
    "finetuning_task",
    "is_llama_config",
    "model_name",
    "name_or_path",
    "tokenizer_class",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
}
_TRAINING = {
    "attention_dropout",
    "attn_dropout",
    "classifier_dropout",
    "embd_dropout",
    "embd_pdrop",
    "gradient_checkpointing",
    "hidden_dropout",
    "initializer_range",
    "neftune_noise_alpha",
    "resid_dropout",
    "resid_pdrop",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "tf_legacy_loss",
    "use_bfloat16",
}
_OTHER_HEADS = {"id2label", "label2id", "num_labels", "problem_type", "task_specific_params"}
# The same numbers by another way, or returned in another form.
_EXECUTION = {
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_attn_implementation_internal",
    "_flash_attn_2_enabled",
    "attn_implementation",
    "chunk_size_feed_forward",
    "is_decoder",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pretraining_tp",
    "return_dict",
    "torchscript",
    "use_cache",
    "use_flash_attention_2",
    "use_flash_attn",
    "use_flashattn",
}
# Ids that text is made of, and lengths that nothing is computed from.
_TEXT = {
    "bos_token_id",
    "decoder_start_token_id",
    "max_sequence_length",
    "model_max_length",
    "pad_token_id",
    "sep_token_id",
    "tokenizer_model_max_length",
    "unk_token_id",
}
# Defaults of sampling and beams: each request says its own.
_SAMPLING = {
    "do_sample",
    "early_stopping",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_scores",
    "return_dict_in_generate",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
}
# Which layers slide; whether any does, `use_sliding_window` and `layer_types` say.
_WINDOWS = {"max_window_layers"}
INERT = frozenset(_ORIGIN | _TRAINING | _OTHER_HEADS | _EXECUTION | _TEXT | _SAMPLING | _WINDOWS)

# Keys that change what is computed, and the values of them that ask for nothing. null is one for
# all of them.
_BIASES: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attention_out_bias": (False,),
    "bias": (False,),
    "lm_head_bias": (False,),
    "mlp_bias": (False,),
    "o_bias": (False,),
    "qkv_bias": (False,),
    "use_bias": (False,),
}
_FACTORS: dict[str, tuple[Any, ...]] = {
    "embedding_multiplier": (1,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "lm_head_multiplier": (1,),
    "residual_multiplier": (1,),
    "scale_emb": (1,),
}
_ATTENTION: dict[str, tuple[Any, ...]] = {
    "alibi": (False,),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "dual_chunk_attention_config": (),
    "final_logit_softcapping": (),
    "is_causal": (True,),
    "log_scale": (False,),
    "logn_attn": (False,),
    "no_rope_layer_interval": (0,),
    "no_rope_layers": ([],),
    "parallel_attn": (False,),
    "query_pre_attn_scalar": (),
    "rope_interleaved": (False,),
    "sliding_window": (),
    "use_alibi": (False,),
    "use_dynamic_ntk": (False,),
    "use_logn_attn": (False,),
    "use_mrope": (False,),
    "use_parallel_residual": (False,),
    "use_sliding_window": (False,),
}
_NORMS: dict[str, tuple[Any, ...]] = {
    "qk_layernorm": (False,),
    "qk_norm": (False,),
    "use_qk_norm": (False,),
}
_EXPERTS: dict[str, tuple[Any, ...]] = {
    "decoder_sparse_step": (),
    "first_k_dense_replace": (0,),
    "mlp_only_layers": ([],),
    "moe_intermediate_size": (),
    "n_group": (),
    "n_routed_experts": (0,),
    "n_shared_experts": (),
    "norm_topk_prob": (),
    "num_experts": (0,),
    "num_experts_per_tok": (0,),
    "num_local_experts": (0,),
    "num_nextn_predict_layers": (0,),
    "routed_scaling_factor": (),
    "shared_expert_intermediate_size": (),
    "topk_group": (),
}
_OTHER_MODELS: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "auto_map": ({},),
    "compression_config": ({},),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "quantization": ({},),
    "tie_encoder_decoder": (False,),
}
# Rules for logits; a request that wants one says so.
LOGITS: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "diversity_penalty": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "exponential_decay_length_penalty": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "min_length": (0,),
    "no_repeat_ngram_size": (0,),
    "prefix": ("",),
    "remove_invalid_values": (False,),
    "repetition_penalty": (1,),
    "suppress_tokens": ([],),
}
NEUTRAL = _BIASES | _FACTORS | _ATTENTION | _NORMS | _EXPERTS | _OTHER_MODELS | LOGITS

log = logging.getLogger(__name__)


def refusal(raw: Mapping[str, Any], family: Family, ignored: Collection[str]) -> str | None:
    """The reason why a configuration is refused, naming the key; None if every key is in order.

    Logs each key that is refused but for `ignored`.
    """
    read = READ | family.keys
    for name in sorted(read.intersection(ignored)):
        return f"ignore_config_keys: {name} is read, so it cannot be ignored"
    neutral, inert = {**NEUTRAL, **family.neutral}, INERT | family.inert
    for name, value in raw.items():
        if value is None or name in read or name in inert or value in neutral.get(name, ()):
            continue
        if name not in ignored:
            return _reason(name, value, family.architecture, neutral)
        tell_ignored(name)
    return None


def tell_ignored(path: str) -> None:
    """Says in the log that a key is left out as the user asked."""
    log.warning("config.json: %s is ignored: the output may not be the model's", path)


def _reason(
    name: str, value: object, architecture: str, neutral: Mapping[str, tuple[Any, ...]]
) -> str:
    if name not in neutral:
        return (
            f"{name}: this key of config.json is not known for {architecture}, and it may change "
            f"the output; if it does not, give --ignore-config-keys {name}"
        )
    served = " or ".join(repr(each) for each in (None, *neutral[name]))
    return f"{name}: {short(value)} is not supported for {architecture}, only {served} is"


def short(value: object) -> str:
    """A value as it is written, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
