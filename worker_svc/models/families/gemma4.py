"""Gemma 4: heads of two sizes, values that are keys, layers that share keys and values.

Small models have inputs of layers, large ones may have experts next to each MLP. The text of the
models with pictures and sounds is this decoder, too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.config_keys import FULL_ATTENTION
from worker_svc.models.config_rope import PART, rotary
from worker_svc.models.families import dense, gemma
from worker_svc.models.families.dense import SLIDING
from worker_svc.models.families.family import Family
from worker_svc.models.rope import ProportionalScaling, RotaryConfig
from worker_svc.models.spec import (
    DIVIDED,
    Activation,
    AttentionSpec,
    LayerInputsSpec,
    LayerSpec,
    MlpAndExpertsSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    RouterSpec,
    TensorNames,
    UnsupportedModel,
)

WITH_PICTURES = "Gemma4ForConditionalGeneration"
OTHER_PARTS = r"model\.(vision_tower|audio_tower|embed_vision|embed_audio)\..*"
PERIOD = 6
FULL_HEAD_DIM = 512  # of layers that see all, where config.json says nothing
BY_LAYER, SHARED, INPUTS = "per_layer_config", "num_kv_shared_layers", "hidden_size_per_layer_input"
# Of the configuration class; published files leave some out.
DEFAULTS: dict[str, Any] = {
    INPUTS: 256,
    "head_dim": 256,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 8,
    "num_hidden_layers": 30,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "vocab_size": 262_144,
    "vocab_size_per_layer_input": 262_144,
}
ROPES: dict[str, Any] = {
    FULL_ATTENTION: {"rope_type": "proportional", PART: 0.25, "rope_theta": 1_000_000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
STACKED = "experts.gate_up_proj", "experts.down_proj"
NAMES = TensorNames(
    post_norm="pre_feedforward_layernorm",
    router="router.proj",
    divided={**DIVIDED, **dict(zip(STACKED, (1, 2), strict=True))},
)


def read(config: ConfigJson) -> ModelSpec:
    config = gemma.with_defaults(config, DEFAULTS)
    kinds = _kinds(config)
    num_own = _num_own(config, kinds)
    by_kind = _attentions(config, kinds)
    layers = tuple(
        _layer(config, by_kind[kind], is_own=index < num_own) for index, kind in enumerate(kinds)
    )
    hidden_size = config.positive("hidden_size")
    has_experts = isinstance(layers[0].feed, MlpAndExpertsSpec)
    spec = ModelSpec(
        architecture=config.architecture,
        vocab_size=config.positive("vocab_size"),
        hidden_size=hidden_size,
        layers=layers,
        ropes=_rotations(config, by_kind),
        rms_norm_eps=float(config.required("rms_norm_eps")),
        max_position_embeddings=config.positive("max_position_embeddings"),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        names=replace(NAMES, stacks_outputs=STACKED) if has_experts else NAMES,
        embedding_scale=math.sqrt(hidden_size),
        logit_softcap=config.above_zero("final_logit_softcapping"),
        layer_inputs=_layer_inputs(config),
    )
    # Some files have what layers with others' keys and values do not read.
    unread = "|".join(str(index) for index in range(num_own, len(layers)))
    prefix, others = NAMES.layers, []
    if config.architecture == WITH_PICTURES:
        spec = replace(spec, names=spec.names.of_text)
        prefix, others = spec.names.layers, [OTHER_PARTS]
    if unread:
        others.append(rf"{prefix}\.({unread})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*")
    return replace(spec, other_parts="|".join(others))


def _kinds(config: ConfigJson) -> Sequence[str]:
    """The kind of each layer; the last one sees all. Raises UnsupportedModel."""
    num_layers = config.positive("num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds is None:
        by_period = [(index + 1) % PERIOD != 0 for index in range(num_layers - 1)]
        return [SLIDING if is_near else FULL_ATTENTION for is_near in by_period] + [FULL_ATTENTION]
    dense.check_types(kinds, (FULL_ATTENTION, SLIDING), num_layers)
    if kinds[-1] != FULL_ATTENTION:
        raise UnsupportedModel(
            f"layer_types: the last layer is of type {kinds[-1]!r}, only {FULL_ATTENTION!r} is "
            "supported"
        )
    return list(kinds)


def _num_own(config: ConfigJson, kinds: Sequence[str]) -> int:
    """The number of layers with keys and values of their own. Raises UnsupportedModel."""
    num_own = len(kinds) - config.count(SHARED)
    if num_own < 1 or set(kinds[:num_own]) != set(kinds):
        raise UnsupportedModel(
            f"{SHARED}: {config.count(SHARED)} of {len(kinds)} leaves a type of layers without any "
            "that has keys and values"
        )
    return num_own


def _attentions(config: ConfigJson, kinds: Sequence[str]) -> Mapping[str, AttentionSpec]:
    """The attention of each kind of layer that there is. Raises UnsupportedModel."""
    num_heads = config.positive("num_attention_heads")
    window = config.window()
    if SLIDING in kinds and window is None:
        raise UnsupportedModel(f"sliding_window: is null, and layers are of type {SLIDING!r}")
    has_bias, v_is_k = config.flag("attention_bias"), config.flag("attention_k_eq_v")
    return {
        kind: AttentionSpec(
            num_heads,
            *_kv_heads(config, kinds, kind),
            gemma.NEAR if kind == SLIDING else gemma.WHOLE,
            window if kind == SLIDING else None,
            qkv_bias=has_bias,
            o_bias=has_bias,
            qk_norm=True,
            v_norm=True,
            v_is_k=v_is_k and kind == FULL_ATTENTION,
            scale=1.0,
        )
        for kind in dict.fromkeys(kinds)
    }


def _kv_heads(config: ConfigJson, kinds: Sequence[str], kind: str) -> tuple[int, int]:
    """The number and the size of KV heads in layers of a kind. Raises UnsupportedModel.

    Released files have keys for all layers that see all tokens; those that transformers saves have
    what differs by layer, and then those keys do not count.
    """
    by_layer = config.get(BY_LAYER)
    if by_layer is None:
        own: dict[str, Any] = {}
        if kind == FULL_ATTENTION:
            own["head_dim"] = config.positive("global_head_dim", FULL_HEAD_DIM)
            if config.flag("attention_k_eq_v"):
                own["num_key_value_heads"] = config.get("num_global_key_value_heads")
        found = {_heads_with(config, own)}
    else:
        changes = _by_layer(by_layer, len(kinds))
        indices = (index for index, each in enumerate(kinds) if each == kind)
        found = {_heads_with(config, changes.get(index, {})) for index in indices}
    if len(found) > 1:
        raise UnsupportedModel(f"{BY_LAYER}: layers of type {kind!r} have KV heads of {found}")
    return found.pop()


def _by_layer(given: object, num_layers: int) -> Mapping[int, Mapping[str, Any]]:
    """The keys that differ by layer. Raises UnsupportedModel for one that is not read."""
    if not isinstance(given, dict):
        raise UnsupportedModel(f"{BY_LAYER}: {given!r} is not an object")
    for index, changes in given.items():
        if not index.isdecimal() or int(index) >= num_layers or not isinstance(changes, dict):
            raise UnsupportedModel(f"{BY_LAYER}: {index!r} is no layer of {num_layers}")
        for name in changes.keys() - {"head_dim", "num_key_value_heads"}:
            raise UnsupportedModel(f"{BY_LAYER}.{index}.{name}: this key is not supported")
    return {int(index): changes for index, changes in given.items()}


def _heads_with(config: ConfigJson, changes: Mapping[str, Any]) -> tuple[int, int]:
    own = {name: value for name, value in changes.items() if value is not None}
    return replace(config, values={**config.values, **own}).heads()[1:]


def _rotations(
    config: ConfigJson, attentions: Mapping[str, AttentionSpec]
) -> Mapping[str, RotaryConfig]:
    """The rotation of each kind of layer. Raises UnsupportedModel."""
    by_kind = config.get("rope_parameters") or ROPES
    if not isinstance(by_kind, dict) or by_kind.keys() - ROPES.keys():
        raise UnsupportedModel("rope_parameters: is not by the kind of layer")
    found = {}
    for kind, attention in attentions.items():
        given = by_kind.get(kind)
        if not isinstance(given, dict) or given.get("rope_theta") is None:
            raise UnsupportedModel(f"rope_parameters.{kind}: has no rope_theta")
        assert attention.rope is not None
        found[attention.rope] = _rotation(config, kind, given, attention.head_dim)
    return found


def _rotation(
    config: ConfigJson, kind: str, given: Mapping[str, Any], head_dim: int
) -> RotaryConfig:
    if given.get("rope_type") != "proportional":
        lengths = {"max_position_embeddings": config.get("max_position_embeddings")}
        return rotary(replace(config, values={"rope_parameters": given, **lengths}), head_dim)
    part = given.get(PART, 1.0)
    if isinstance(part, bool) or not isinstance(part, int | float) or not 0 < part <= 1:
        raise UnsupportedModel(f"rope_parameters.{kind}.{PART}: {part!r} is no part of a head")
    for name in given.keys() - {"rope_type", "rope_theta", PART}:
        raise UnsupportedModel(f"rope_parameters.{kind}.{name}: this key is not supported")
    return RotaryConfig(float(given["rope_theta"]), ProportionalScaling(float(part)))


def _layer(config: ConfigJson, attention: AttentionSpec, *, is_own: bool) -> LayerSpec:
    """A layer whose keys and values are its own, or those of one before."""
    is_wide = not is_own and config.flag("use_double_wide_mlp")
    mlp = MlpSpec(
        config.positive("intermediate_size") * (2 if is_wide else 1),
        activation=gemma.activation(config),
    )
    experts = _experts(config)
    return LayerSpec(
        attention if is_own else replace(attention, shares_kv=True),
        mlp if experts is None else MlpAndExpertsSpec(mlp, experts),
        norms_outputs=True,
        has_factor=True,
    )


def _experts(config: ConfigJson) -> MoeSpec | None:
    """The experts of each layer; None: there are none. Raises UnsupportedModel."""
    if not config.flag("enable_moe_block"):
        return None
    num_experts, top_k = config.positive("num_experts"), config.positive("top_k_experts")
    if top_k > num_experts:
        raise UnsupportedModel(f"top_k_experts: {top_k} of {num_experts} experts")
    return MoeSpec(
        RouterSpec(num_experts, top_k, renormalizes=True),
        config.positive("moe_intermediate_size"),
        activation=Activation.GELU_TANH,
    )


def _layer_inputs(config: ConfigJson) -> LayerInputsSpec | None:
    size = config.count(INPUTS)
    if not size:
        return None
    vocab_size = config.positive("vocab_size_per_layer_input")
    if vocab_size < config.positive("vocab_size"):
        raise UnsupportedModel(
            f"vocab_size_per_layer_input: {vocab_size} is less than the vocab_size of "
            f"{config.positive('vocab_size')}"
        )
    return LayerInputsSpec(size, vocab_size)


FAMILY = Family(
    "Gemma4ForCausalLM",
    "gemma4_text",
    read,
    keys=frozenset(
        {
            BY_LAYER,
            SHARED,
            INPUTS,
            "attention_bias",
            "attention_k_eq_v",
            "enable_moe_block",
            "final_logit_softcapping",
            "global_head_dim",
            "hidden_activation",
            "moe_intermediate_size",
            "num_experts",
            "num_global_key_value_heads",
            "sliding_window",
            "top_k_experts",
            "use_double_wide_mlp",
            "vocab_size_per_layer_input",
        }
    ),
    # Both ways between the tokens of a picture alone; of text each sees those before.
    neutral={"use_bidirectional_attention": ("vision",)},
    # About pictures and sounds.
    inert=frozenset(
        {
            "audio_config",
            "audio_token_id",
            "boa_token_id",
            "boi_token_id",
            "eoa_token_id",
            "eoa_token_index",
            "eoi_token_id",
            "image_token_id",
            "video_token_id",
            "vision_config",
            "vision_soft_tokens_per_image",
        }
    ),
    wrappers=frozenset({WITH_PICTURES}),
    measured_on_cuda=False,
)
