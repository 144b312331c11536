"""LFM2: gated short convolutions in most layers, attention with QK norms in the others."""

from collections.abc import Sequence
from dataclasses import replace

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.config_keys import FULL_ATTENTION
from worker_svc.models.families import dense
from worker_svc.models.families.family import Family
from worker_svc.models.spec import (
    DIVIDED,
    ModelSpec,
    ShortConvSpec,
    TensorNames,
    UnsupportedModel,
)

CONV = "conv"  # the type of a layer
# Where config.json has none:
WIDTH, MULTIPLE, EPS, THETA = 3, 256, 1e-5, 1_000_000.0
NAMES = TensorNames(
    final_norm="model.embedding_norm",
    input_norm="operator_norm",
    post_norm="ffn_norm",
    recurrent="conv",
    q_norm="q_layernorm",
    k_norm="k_layernorm",
    attention_output="out_proj",
    mlp="feed_forward",
    mlp_gate="w1",
    mlp_up="w3",
    mlp_down="w2",
    divided={
        **DIVIDED,
        "in_proj.weight": 0,
        "in_proj.bias": 0,
        "conv.weight": 0,
        "conv.bias": 0,
        "out_proj.weight": 1,
        "w1.weight": 0,
        "w3.weight": 0,
        "w2.weight": 1,
    },
)
KEYS = frozenset({"conv_L_cache", "conv_bias", "norm_eps", "tie_embedding"})


def read(config: ConfigJson) -> ModelSpec:
    size = _intermediate_size(config)
    kinds = config.get("layer_types") or _kinds(config)
    return decoder(config, kinds, size)


def decoder(config: ConfigJson, kinds: Sequence[str], intermediate_size: int) -> ModelSpec:
    """The model of layers of these types, each with an MLP of this size.

    Raises UnsupportedModel, naming the key.
    """
    tied = config.flag("tie_embedding", config.flag("tie_word_embeddings", True))
    values = {
        **config.values,
        "intermediate_size": intermediate_size,
        "layer_types": None,
        "rms_norm_eps": config.above_zero("norm_eps", EPS),
        "tie_word_embeddings": tied,
    }
    spec = dense.decoder(replace(config, values=values), qk_norm=True, default_theta=THETA)
    dense.check_types(kinds, (CONV, FULL_ATTENTION), spec.num_layers)
    conv = ShortConvSpec(
        spec.hidden_size, config.positive("conv_L_cache", WIDTH), config.flag("conv_bias")
    )
    layers = (
        replace(layer, mixer=conv) if kind == CONV else layer
        for kind, layer in zip(kinds, spec.layers, strict=True)
    )
    return replace(spec, layers=tuple(layers), names=NAMES)


def _kinds(config: ConfigJson) -> list[str]:
    """The types of layers, by the indices of those with attention. Raises UnsupportedModel."""
    indices = config.get("full_attn_idxs")
    num_layers = config.positive("num_hidden_layers")
    if indices is None:
        return [FULL_ATTENTION] * num_layers
    if not isinstance(indices, list) or any(type(each) is not int for each in indices):
        raise UnsupportedModel(f"full_attn_idxs: {indices!r} is no list of integers")
    return [FULL_ATTENTION if index in indices else CONV for index in range(num_layers)]


def _intermediate_size(config: ConfigJson) -> int:
    """The size of an MLP, of which config.json has the one before an adjustment."""
    name = "intermediate_size" if config.get("block_ff_dim") is None else "block_ff_dim"
    size = config.positive(name)
    if not config.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    factor = "block_ffn_dim_multiplier"
    if config.values.get(factor, 1.0) is None:
        return size
    multiple = config.positive("block_multiple_of", MULTIPLE)
    return -(-int(config.above_zero(factor, 1.0) * size) // multiple) * multiple


FAMILY = Family(
    "Lfm2ForCausalLM",
    "lfm2",
    read,
    keys=KEYS
    | {
        "block_auto_adjust_ff_dim",
        "block_ff_dim",
        "block_ffn_dim_multiplier",
        "block_multiple_of",
        "full_attn_idxs",
    },
    neutral={"block_use_swiglu": (True,), "use_pos_enc": (True,)},
    # How weights were drawn, and second names of numbers that other keys have.
    inert=frozenset(
        {
            "block_dim",
            "block_mlp_init_scale",
            "block_norm_eps",
            "block_out_init_scale",
            "block_use_xavier_init",
            "conv_dim",
            "conv_dim_out",
            "conv_use_xavier_init",
            "num_heads",
            "theta",
        }
    ),
)
