"""Reads how a config.json says that layers rotate.

Both forms are read: `rope_theta` and `rope_scaling` (transformers 4), and `rope_parameters`
(transformers 5).
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from typing import Any

from worker_svc.models import config_keys
from worker_svc.models.config_file import ConfigJson
from worker_svc.models.rope import (
    DynamicScaling,
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RotaryConfig,
    Scaling,
    YarnScaling,
)
from worker_svc.models.spec import UnsupportedModel

THETA = 10_000.0  # where config.json says none
PART = "partial_rotary_factor"
ORIGINAL_LENGTH = "original_max_position_embeddings"
HAVE_ORIGINAL_LENGTH = ("llama3", "longrope", "yarn")
SCALINGS: dict[str, type[Scaling]] = {
    "dynamic": DynamicScaling,
    "factors": FactorScaling,
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "longrope": LongRopeScaling,
    "yarn": YarnScaling,
}


def rotary(
    config: ConfigJson,
    head_dim: int,
    default_theta: float = THETA,
    default_part: float | None = None,
    inert: Collection[str] = (),
) -> RotaryConfig:
    """The rotation of heads of this size. Raises UnsupportedModel.

    `default_part` is that of a family that rotates a part of each head, where config.json says
    none; None: this one rotates whole heads. `inert` are keys of the rotation that change nothing.
    """
    given = [name for name in ("rope_parameters", "rope_scaling") if config.get(name)]
    read = [
        _rotary_in(config, name, default_theta, default_part, inert)
        for name in given or ["rope_scaling"]
    ]
    if any((other.scaling, other.part) != (read[0].scaling, read[0].part) for other in read):
        raise UnsupportedModel("rope_scaling: differs from rope_parameters, and only one can hold")
    return _check_pairs(read[0], read[0].size(head_dim))


def _rotary_in(
    config: ConfigJson,
    where: str,
    default_theta: float,
    default_part: float | None,
    inert: Collection[str],
) -> RotaryConfig:
    value = config.get(where) or {}
    if not isinstance(value, dict):
        raise UnsupportedModel(f"config.json: {where} is {value!r}, not an object")
    given = dict(value)
    theta = float(given.pop("rope_theta", None) or config.get("rope_theta") or default_theta)
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    part = _part(config, given.pop(PART, None), default_part)
    for name in inert:
        given.pop(name, None)
    if kind != "default" and kind not in SCALINGS:
        raise UnsupportedModel(
            f"{where}: rope_type {kind!r} is not supported; "
            f"supported are default, {', '.join(SCALINGS)}"
        )
    if kind in HAVE_ORIGINAL_LENGTH:
        _set_original_length(config, kind, given)
    return RotaryConfig(theta, _scaling(where, kind, given, config.ignored_keys), part)


def _part(config: ConfigJson, given: object, default: float | None) -> float:
    """The part of each head that is rotated. Raises UnsupportedModel."""
    part = given or config.get(PART) or default or 1.0
    if default is None and part != 1.0:
        raise UnsupportedModel(f"{PART}: {part} is not supported, only 1 is")
    if isinstance(part, bool) or not isinstance(part, int | float) or not 0 < part <= 1:
        raise UnsupportedModel(f"{PART}: {part!r} is no part of a head")
    return float(part)


def _set_original_length(config: ConfigJson, kind: str, given: dict[str, Any]) -> None:
    """Sets the length that the model was made for, and what follows from it, as transformers does.

    The key of config.json itself goes before that of the scaling.
    """
    longest, original = config.get("max_position_embeddings"), config.get(ORIGINAL_LENGTH)
    if original is not None:
        given[ORIGINAL_LENGTH] = original
    elif kind != "llama3" and given.get(ORIGINAL_LENGTH) is None:
        given[ORIGINAL_LENGTH] = longest
    original = given.get(ORIGINAL_LENGTH)
    if original is not None and (type(original) is not int or original < 2):
        raise UnsupportedModel(f"{ORIGINAL_LENGTH}: {original!r} is not an integer above 1")
    if kind == "longrope" and given.get("factor") is None and isinstance(longest, int):
        given["factor"] = longest / given[ORIGINAL_LENGTH]


def _scaling(
    where: str, kind: str, given: Mapping[str, Any], ignored: Collection[str]
) -> Scaling | None:
    known = {field.name: field for field in fields(SCALINGS[kind])} if kind in SCALINGS else {}
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
        if value is not None
    }
    for name in [name for name in values if name not in known]:
        path = f"{where}.{name}"
        if path not in ignored:
            raise UnsupportedModel(
                f"{where}: {name} is not supported with rope_type {kind!r}; if it changes nothing, "
                f"give --ignore-config-keys {path}"
            )
        config_keys.tell_ignored(path)
        del values[name]
    for name, value in values.items():
        _check_scaling(f"{where}.{name}", value)
    for name, field in known.items():
        if field.default is MISSING and name not in values:
            raise UnsupportedModel(f"{where}: {name} is missing for rope_type {kind!r}")
    return SCALINGS[kind](**values) if kind in SCALINGS else None


def _check_scaling(path: str, value: object) -> None:
    """Raises UnsupportedModel for what is no number, or a factor that is not above zero."""
    is_switch = path.endswith(".truncate")
    if is_switch and isinstance(value, bool):
        return
    for number in value if isinstance(value, tuple) else (value,):
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if is_switch or not is_number or not math.isfinite(number):
            raise UnsupportedModel(f"{path}: {number!r} cannot be served")
        if number <= 0 and "factor" in path:
            raise UnsupportedModel(f"{path}: {number!r} is not above 0")


def _check_pairs(rope: RotaryConfig, size: int) -> RotaryConfig:
    """Raises UnsupportedModel unless `size` dimensions are pairs, with a factor for each."""
    if size < 2 or size % 2:
        raise UnsupportedModel(f"{PART}: {size} dimensions of a head are no pairs")
    for name in ("factors", "short_factor", "long_factor"):
        factors = getattr(rope.scaling, name, None)
        if isinstance(factors, tuple) and len(factors) != size // 2:
            raise UnsupportedModel(
                f"rope_scaling.{name}: has {len(factors)} factors for {size // 2} pairs of "
                "dimensions"
            )
    return rope
