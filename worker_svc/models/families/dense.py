"""The decoder that most families share: attention with rotation, and a gated MLP."""

from collections.abc import Sequence
from dataclasses import replace

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.config_keys import FULL_ATTENTION
from worker_svc.models.config_rope import THETA, rotary
from worker_svc.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, UnsupportedModel

ROPE = "rope"  # the one rotation of such a model
WINDOW_KEYS = frozenset({"sliding_window", "use_sliding_window"})
QWEN_KEYS = WINDOW_KEYS | {"max_window_layers"}
SLIDING = "sliding_attention"
# Of Qwen's configuration classes, where config.json says nothing.
QWEN_WINDOW, QWEN_FULL_LAYERS = 4096, 28


def decoder(
    config: ConfigJson,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    window: int | None = None,
    may_slide: bool = False,
    default_theta: float = THETA,
    default_part: float | None = None,
    is_tied: bool = False,
) -> ModelSpec:
    """A model of equal layers. Raises UnsupportedModel, naming the key.

    `window` is that of all layers. With `may_slide` the caller reads `layer_types`, in which layers
    may slide. `default_theta`, `default_part` and `is_tied` hold where config.json says nothing of
    them; without a `default_part` whole heads are rotated.
    """
    _refuse_variants(config, (FULL_ATTENTION, SLIDING) if may_slide else (FULL_ATTENTION,))
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
        ropes={ROPE: rotary(config, head_dim, default_theta, default_part)},
        rms_norm_eps=float(config.required("rms_norm_eps")),
        max_position_embeddings=config.positive("max_position_embeddings"),
        tie_word_embeddings=config.flag("tie_word_embeddings", is_tied),
    )


def sliding_layers(config: ConfigJson, otherwise: Sequence[bool]) -> Sequence[bool]:
    """True for each layer that `layer_types` says slides; `otherwise` where the key is not there.

    Raises UnsupportedModel for another number of layers.
    """
    kinds = config.get("layer_types")
    if kinds is None:
        return otherwise
    if len(kinds) != len(otherwise):
        raise UnsupportedModel(f"layer_types: {len(kinds)} entries for {len(otherwise)} layers")
    return [kind == SLIDING for kind in kinds]


def windowed(
    config: ConfigJson, spec: ModelSpec, window: int | None, slides: Sequence[bool]
) -> ModelSpec:
    """The model with a window on the layers that `layer_types` names, or else on these.

    Raises UnsupportedModel.
    """
    kinds = config.get("layer_types")
    if kinds is not None and SLIDING in kinds and window is None:
        raise UnsupportedModel(f"layer_types: {SLIDING!r} without a sliding_window in use")
    if window is None:
        return spec
    slides = sliding_layers(config, slides)
    layers = (
        replace(layer, mixer=replace(layer.attention, window=window if is_sliding else None))
        for layer, is_sliding in zip(spec.layers, slides, strict=True)
    )
    return replace(spec, layers=tuple(layers))


def windowed_throughout(config: ConfigJson, spec: ModelSpec, window: int | None) -> ModelSpec:
    """The model with a window on all layers, as classes give it that read no `layer_types`.

    Raises UnsupportedModel.
    """
    kinds = config.get("layer_types")
    if window is not None and kinds is not None and set(kinds) != {SLIDING}:
        if SLIDING in kinds:
            raise UnsupportedModel(
                f"layer_types: layers of {config.architecture} have one window, or all none"
            )
        return replace(spec, unsure_window=window)  # the configuration contradicts the class
    return windowed(config, spec, window, [True] * spec.num_layers)


def qwen_window(config: ConfigJson) -> int | None:
    """The window of Qwen's configurations; None: it is not in use. Raises UnsupportedModel."""
    return config.window(absent=QWEN_WINDOW) if config.get("use_sliding_window") else None


def windowed_as_qwen(config: ConfigJson, spec: ModelSpec) -> ModelSpec:
    """The model with a window on its layers from `max_window_layers` on, if it is in use."""
    window = qwen_window(config)
    num_full = config.get("max_window_layers")
    num_full = QWEN_FULL_LAYERS if num_full is None else num_full
    if window is not None and (not isinstance(num_full, int) or num_full < 0):
        raise UnsupportedModel(f"max_window_layers: {num_full!r} is no number of layers")
    return windowed(config, spec, window, [i >= num_full for i in range(spec.num_layers)])


def _refuse_variants(config: ConfigJson, layer_types: Sequence[str]) -> None:
    refuse_activations(config)
    refuse_layer_types(config, layer_types)


def refuse_activations(config: ConfigJson) -> None:
    """Raises UnsupportedModel for an activation other than SiLU."""
    activation = config.values.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"hidden_act: {activation!r} is not supported, only 'silu' is")


def refuse_layer_types(config: ConfigJson, served: Sequence[str]) -> None:
    """Raises UnsupportedModel for a layer of another type."""
    _check_types(config.get("layer_types") or (), served)


def check_types(kinds: Sequence[str], served: Sequence[str], num_layers: int) -> None:
    """Raises UnsupportedModel unless each of so many layers has one of these types."""
    if len(kinds) != num_layers:
        raise UnsupportedModel(f"layer_types: {len(kinds)} entries for {num_layers} layers")
    _check_types(kinds, served)


def _check_types(kinds: Sequence[str], served: Sequence[str]) -> None:
    for kind in kinds:
        if kind not in served:
            raise UnsupportedModel(f"layer_types: {kind!r} is not supported")
