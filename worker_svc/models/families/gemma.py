"""The decoder that generations of Gemma share.

Outputs of attention and MLP are normed before they are added, weights of norms are stored less 1,
and embeddings are multiplied by the root of their size.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.config_keys import FULL_ATTENTION
from worker_svc.models.families import dense
from worker_svc.models.families.dense import SLIDING
from worker_svc.models.spec import (
    Activation,
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    TensorNames,
    UnsupportedModel,
)

WHOLE, NEAR = "whole", "near"  # rotations: of layers that see all, and of those with a window
KEYS = frozenset({"attention_bias", "hidden_activation", "query_pre_attn_scalar", "sliding_window"})
# Keys of the configuration classes that change nothing, or nothing under these values.
INERT = frozenset({"cache_implementation"})
NEUTRAL: Mapping[str, tuple[Any, ...]] = {"use_bidirectional_attention": (False,)}


def with_defaults(config: ConfigJson, defaults: Mapping[str, Any]) -> ConfigJson:
    """The configuration with a class's own values where config.json says nothing."""
    given = {name: value for name, value in config.values.items() if value is not None}
    absent = {name: value for name, value in defaults.items() if name not in config.values}
    return replace(config, values={**given, **absent})


def decoder(
    config: ConfigJson,
    *,
    period: int,
    qk_norm: bool = False,
    score_softcap: float | None = None,
    logit_softcap: float | None = None,
) -> ModelSpec:
    """A model without its rotations. Raises UnsupportedModel, naming the key.

    Where config.json does not list them, every `period`-th layer sees all and others have a window.
    """
    num_layers = config.positive("num_hidden_layers")
    hidden_size = config.positive("hidden_size")
    num_heads, num_kv_heads, head_dim = config.heads()
    has_bias = config.flag("attention_bias")
    whole = AttentionSpec(
        num_heads,
        num_kv_heads,
        head_dim,
        WHOLE,
        qkv_bias=has_bias,
        o_bias=has_bias,
        qk_norm=qk_norm,
        scale=float(config.positive("query_pre_attn_scalar")) ** -0.5,
        softcap=score_softcap,
    )
    near = replace(whole, rope=NEAR, window=config.window())
    feed = MlpSpec(config.positive("intermediate_size"), activation=activation(config))
    dense.refuse_layer_types(config, (FULL_ATTENTION, SLIDING))
    by_period = [(index + 1) % period != 0 for index in range(num_layers)]
    slides = dense.sliding_layers(config, by_period)
    if any(slides) and near.window is None:
        raise UnsupportedModel(f"sliding_window: is null, and layers are of type {SLIDING!r}")
    layers = (LayerSpec(near if is_near else whole, feed, norms_outputs=True) for is_near in slides)
    return ModelSpec(
        architecture=config.architecture,
        vocab_size=config.positive("vocab_size"),
        hidden_size=hidden_size,
        layers=tuple(layers),
        ropes={},
        rms_norm_eps=float(config.required("rms_norm_eps")),
        max_position_embeddings=config.positive("max_position_embeddings"),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        names=TensorNames(post_norm="pre_feedforward_layernorm"),
        embedding_scale=math.sqrt(hidden_size),
        norm_offset=1.0,
        logit_softcap=logit_softcap,
    )


def activation(config: ConfigJson) -> Activation:
    """The activation of MLPs. Raises UnsupportedModel for another than is served."""
    served = Activation.GELU_TANH
    for name in ("hidden_activation", "hidden_act"):  # the second is of older files, and not read
        if config.get(name) not in (None, served.value):
            raise UnsupportedModel(
                f"{name}: {config.get(name)!r} is not supported, only {served.value!r} is"
            )
    return served
