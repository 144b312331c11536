"""Settings of a quantization: each key is read, or changes nothing, or is refused by name."""

from collections.abc import Collection, Mapping
from typing import Any

from worker_svc.quantization.scheme import UnsupportedQuantization

WHERE = "quantization_config"
LM_HEAD = "lm_head"


def check_keys(
    where: str,
    given: Mapping[str, Any],
    read: Collection[str],
    inert: Collection[str] = (),
    neutral: Mapping[str, Collection[Any]] | None = None,
) -> None:
    """Raises UnsupportedQuantization for a key that may change the output; null asks for nothing.

    `neutral` has values that ask for nothing, by key.
    """
    neutral = neutral or {}
    for name, value in given.items():
        if value is None or name in read or name in inert:
            continue
        if name not in neutral:
            raise UnsupportedQuantization(
                f"{where}.{name}: this key is not known, and it may change the output"
            )
        if value not in neutral[name]:
            served = " or ".join(repr(each) for each in (None, *neutral[name]))
            raise UnsupportedQuantization(
                f"{where}.{name}: {value!r} is not supported, only {served} is"
            )


def one_of(
    where: str, given: Mapping[str, Any], name: str, known: Collection[Any], default: Any = None
) -> Any:
    """The value of a key; null is the default. Raises UnsupportedQuantization for any other."""
    value = given.get(name)
    value = default if value is None else value
    # True == 1, and neither may stand for the other.
    if not any(value == each and type(value) is type(each) for each in known):
        served = ", ".join(repr(each) for each in known)
        raise UnsupportedQuantization(
            f"{where}.{name}: {value!r} is not supported; supported are {served}"
        )
    return value


def flag(where: str, given: Mapping[str, Any], name: str, default: bool) -> bool:
    """A key that is true or false; null is the default."""
    return bool(one_of(where, given, name, (False, True), default))


def group_size(where: str, given: Mapping[str, Any], name: str = "group_size") -> int | None:
    """Columns that share a scale; None: all. Raises UnsupportedQuantization."""
    value = given.get(name)
    if value == -1:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedQuantization(f"{where}.{name}: {value!r} is neither positive nor -1")
    return value


def names(where: str, given: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A list of names; null is an empty one."""
    value = given.get(name) or []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise UnsupportedQuantization(f"{where}.{name}: {value!r} is not a list of names")
    return tuple(value)


def is_part(name: str, patterns: Collection[str]) -> bool:
    """Whether a layer is one of these, or in one: `lm_head`, `model.layers.0`, `down_proj`."""
    inside = f".{name}."
    return any(f".{pattern.strip('.')}." in inside for pattern in patterns)
