"""The decoder that most families share: full attention with rotation, and a gated MLP."""

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.config_keys import FULL_ATTENTION
from worker_svc.models.config_rope import THETA, rotary
from worker_svc.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, UnsupportedModel

ROPE = "rope"  # the one rotation of such a model
WINDOW_KEYS = frozenset({"sliding_window", "use_sliding_window"})


def decoder(
    config: ConfigJson,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    window: int | None = None,
    default_theta: float = THETA,
    is_tied: bool = False,
) -> ModelSpec:
    """A model of equal layers. Raises UnsupportedModel, naming the key.

    `default_theta` and `is_tied` hold where config.json says nothing of them.
    """
    _refuse_variants(config)
    num_heads, num_kv_heads, head_dim = config.heads()
    attention = AttentionSpec(
        num_heads, num_kv_heads, head_dim, ROPE, window, qkv_bias, o_bias, qk_norm
    )
    layer = LayerSpec(attention, MlpSpec(config.positive("intermediate_size"), mlp_bias))
    return ModelSpec(
        architecture=config.architecture,
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        layers=(layer,) * config.positive("num_hidden_layers"),
        ropes={ROPE: rotary(config, head_dim, default_theta)},
        rms_norm_eps=float(config.required("rms_norm_eps")),
        max_position_embeddings=config.positive("max_position_embeddings"),
        tie_word_embeddings=config.flag("tie_word_embeddings", is_tied),
    )


def refuse_windows(config: ConfigJson) -> None:
    """Raises UnsupportedModel if `use_sliding_window` has some layers attend over a window."""
    if config.get("use_sliding_window"):
        raise UnsupportedModel("use_sliding_window: attention over a window is not supported")


def _refuse_variants(config: ConfigJson) -> None:
    activation = config.values.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"hidden_act: {activation!r} is not supported, only 'silu' is")
    for kind in config.get("layer_types") or ():
        if kind != FULL_ATTENTION:
            raise UnsupportedModel(f"layer_types: {kind!r} is not supported")
