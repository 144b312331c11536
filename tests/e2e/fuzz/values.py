"""Values at the edges: of number types, of text, of nesting and of size."""

import random
from typing import Any

HUGE = "1e400"  # JSON that Python reads as infinity; written in place of the marker
HUGE_MARK = "\ue000huge\ue000"
INTEGERS = (
    *(0, 1, -1, 2, 7, 16, 17, 127, 128, 255, 256, 65535, 65536),
    *(2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**32 - 1, 2**32),
    *(2**53, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64 - 1, 2**64, 10**30, 10**400),
)
FLOATS = (0.0, -0.0, 0.5, 1.0, 1.5, 2.0, 5e-324, 1e-5, 3.4e38, 1e39, 1.8e308, float("nan"))
INFINITIES = (float("inf"), float("-inf"))
TEXTS = (
    *("", " ", "a", "auto", "none", "user", "assistant", "system", "tool", "json_object"),
    *("\0", "\n", "\ud800", "\udfff\ud800", "\u202e", "\ufeff", "é", "😀", "👩‍👩‍👧", "日本語"),
    *("<|im_start|>", "<|endoftext|>", "{{ 7*7 }}", "{%", "../../etc/passwd", "x" * 300),
    *("%s%n", "null", "true", "-1", "1e400", "NaN", "[", "a{999999}", "(a+)+$", "\\", "'\"`"),
)


def number(rng: random.Random) -> Any:
    """An integer or a float."""
    if rng.random() < 0.6:
        return rng.choice(INTEGERS)
    return rng.choice([*FLOATS, *INFINITIES, HUGE_MARK])


def text(rng: random.Random) -> str:
    """A string; now and then a long one."""
    chosen = rng.choice(TEXTS)
    return chosen * rng.choice((1, 1, 1, 1, 2, 100)) if chosen else chosen


def nested(rng: random.Random) -> Any:
    """Arrays or objects within each other."""
    value: Any = rng.choice((1, "a", None))
    depth = rng.choice((2, 5, 30, 200, 900))
    for _ in range(depth):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def anything(rng: random.Random) -> Any:
    """Any JSON value."""
    kind = rng.random()
    if kind < 0.35:
        return number(rng)
    if kind < 0.65:
        return text(rng)
    if kind < 0.75:
        return rng.choice((None, True, False))
    if kind < 0.9:
        return rng.choice(([], {}, [None], [{}], [[]], {"": 0}, [0] * 2000, {"a": {"b": [1, "c"]}}))
    return nested(rng)


def of_kind(kind: str, rng: random.Random) -> Any:
    """A value of a JSON schema's type; small and ordinary ones as often as edges."""
    match kind:
        case "integer":
            return rng.choice((rng.randrange(1, 9), rng.choice(INTEGERS)))
        case "number":
            return rng.choice((rng.random(), number(rng)))
        case "string":
            return text(rng)
        case "boolean":
            return rng.random() < 0.5
        case "array":
            one = rng.choice(("integer", "string", "number"))
            return [of_kind(one, rng) for _ in range(rng.choice((0, 1, 2, 5, 40)))]
        case "object":
            return {text(rng): anything(rng) for _ in range(rng.choice((0, 1, 3)))}
    return None
