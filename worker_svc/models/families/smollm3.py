"""SmolLM3: every fourth layer, or those that the configuration lists, does not rotate.

These layers may have a window.
"""

from dataclasses import replace

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.families import dense
from worker_svc.models.families.family import Family
from worker_svc.models.spec import ModelSpec, UnsupportedModel

INTERVAL, THETA = 4, 2_000_000.0  # where config.json has none


def read(config: ConfigJson) -> ModelSpec:
    has_bias = config.flag("attention_bias")
    spec = dense.decoder(
        config,
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=config.flag("mlp_bias"),
        default_theta=THETA,
        is_tied=True,
        may_slide=True,
    )
    rotates = _rotates(config, spec.num_layers)
    layers = (
        layer if does else layer.unrotated for layer, does in zip(spec.layers, rotates, strict=True)
    )
    spec = replace(spec, layers=tuple(layers))
    window = config.window() if config.get("use_sliding_window") else None
    return dense.windowed(config, spec, window, [not does for does in rotates])


def _rotates(config: ConfigJson, num_layers: int) -> list[bool]:
    """True for each layer that rotates. Raises UnsupportedModel."""
    listed = config.get("no_rope_layers")  # 1: the layer rotates
    if listed is None:
        interval = config.positive("no_rope_layer_interval", INTERVAL)
        return [(index + 1) % interval != 0 for index in range(num_layers)]
    if not isinstance(listed, list) or any(each not in (0, 1) for each in listed):
        raise UnsupportedModel(f"no_rope_layers: {listed!r} is no list of 0 and 1")
    if len(listed) < num_layers:
        raise UnsupportedModel(f"no_rope_layers: {len(listed)} entries for {num_layers} layers")
    return [bool(each) for each in listed[:num_layers]]


FAMILY = Family(
    "SmolLM3ForCausalLM",
    "smollm3",
    read,
    keys=dense.WINDOW_KEYS
    | {"attention_bias", "mlp_bias", "no_rope_layer_interval", "no_rope_layers"},
)
