"""SmolLM3: every fourth layer, or those that the configuration lists, does not rotate."""

from dataclasses import replace

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.families import dense
from worker_svc.models.families.family import Family
from worker_svc.models.spec import ModelSpec, UnsupportedModel

INTERVAL, THETA = 4, 2_000_000.0  # where config.json has none


def read(config: ConfigJson) -> ModelSpec:
    if config.get("sliding_window") is not None:
        dense.refuse_windows(config)
    has_bias = config.flag("attention_bias")
    spec = dense.decoder(
        config,
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=config.flag("mlp_bias"),
        default_theta=THETA,
        is_tied=True,
    )
    layers = (
        layer if rotates else layer.unrotated
        for layer, rotates in zip(spec.layers, _rotates(config, spec.num_layers), strict=True)
    )
    return replace(spec, layers=tuple(layers))


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
