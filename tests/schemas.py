"""Random JSON schemas of common kinds, small enough for a small model to complete.

Content is bounded everywhere, so that every output ends.
"""

import random
from typing import Any

Schema = dict[str, Any]

NAMES = [
    "id",
    "name",
    "title",
    "city",
    "status",
    "price",
    "count",
    "tags",
    "items",
    "address",
    "owner",
    "kind",
    "created",
    "email",
]
WORDS = [
    "red",
    "green",
    "blue",
    "open",
    "closed",
    "pending",
    "low",
    "high",
    "small",
    "large",
    "north",
    "south",
    "urgent",
    "draft",
]
PATTERNS = ("^[A-Z]{2}-[0-9]{3}$", "^#[0-9a-f]{6}$", "^(yes|no)$", "^[a-z]+_[0-9]$", "[0-9]{2}")
FORMATS = ("date", "ipv4", "time", "email")


def make_schema(seed: int) -> Schema:
    """The schema of a number: an object, an array, a union or a single value."""
    return _Maker(seed).root()


class _Maker:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._definitions: dict[str, Schema] = {}

    def root(self) -> Schema:
        if self._random.random() < 0.4:
            for name in self._random.sample(["Point", "Label", "Node"], self._between(1, 2)):
                self._definitions[name] = self._object(1) if name == "Point" else self._leaf()
        shapes = (self._object, self._object, self._object, self._array, self._union)
        schema = self._random.choice(shapes)(3)
        if self._definitions:
            schema["$defs"] = self._definitions
        if self._random.random() < 0.3:
            schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
            schema["title"] = "Something"
        return schema

    def _any(self, depth: int) -> Schema:
        roll = self._random.random()
        if self._definitions and roll < 0.2:
            return {"$ref": f"#/$defs/{self._random.choice(list(self._definitions))}"}
        if depth <= 0 or roll < 0.6:
            return self._leaf()
        return self._random.choice((self._object, self._array, self._union))(depth - 1)

    def _leaf(self) -> Schema:
        makers = (
            self._text, self._pattern, self._format, self._enum, self._const,
            self._integer, self._number, self._simple, self._nullable,
        )  # fmt: skip
        return self._random.choice(makers)()

    def _text(self) -> Schema:
        schema: Schema = {"type": "string", "maxLength": self._between(4, 12)}
        if self._random.random() < 0.4:
            schema["minLength"] = self._between(1, 4)
        if self._random.random() < 0.3:
            schema["description"] = "what it is called"
        return schema

    def _pattern(self) -> Schema:
        return {"type": "string", "pattern": self._random.choice(PATTERNS), "maxLength": 9}

    def _format(self) -> Schema:
        return {"type": "string", "format": self._random.choice(FORMATS), "maxLength": 18}

    def _enum(self) -> Schema:
        values: list[Any] = self._random.sample(WORDS, self._between(2, 5))
        if self._random.random() < 0.3:
            values += [None, 7, {"a": [True]}]
        return {"enum": values}

    def _const(self) -> Schema:
        return {"const": self._random.choice([*WORDS[:3], 42, True, None, [1, "x"]])}

    def _integer(self) -> Schema:
        low = self._between(-50, 50)
        schema: Schema = {"type": "integer", "minimum": low, "maximum": low + self._between(3, 900)}
        if self._random.random() < 0.2:
            schema["multipleOf"] = self._between(2, 5)
        return schema

    def _number(self) -> Schema:
        low = self._between(-5, 5)
        kind = self._random.choice(["minimum", "exclusiveMinimum"])
        return {"type": "number", kind: low, "maximum": low + 10, "multipleOf": 0.25}

    def _simple(self) -> Schema:
        return {"type": self._random.choice(["boolean", "null", "boolean"])}

    def _nullable(self) -> Schema:
        if self._random.random() < 0.5:
            return {"type": ["integer", "null"], "minimum": 0, "maximum": 99}
        return {"anyOf": [self._text(), {"type": "null"}], "default": None}

    def _object(self, depth: int) -> Schema:
        names = self._random.sample(NAMES, self._between(1, 4))
        schema: Schema = {
            "type": "object",
            "properties": {name: self._any(depth - 1) for name in names},
            "required": [name for name in names if self._random.random() < 0.7],
            "additionalProperties": False,
        }
        if self._random.random() < 0.2:
            schema["patternProperties"] = {"^x_[a-z]{1,3}$": {"type": "boolean"}}
            schema["maxProperties"] = len(names) + 2
            schema["required"] = names  # otherwise the engine cannot count keys
        return schema

    def _array(self, depth: int) -> Schema:
        if self._random.random() < 0.2:
            firsts = [self._leaf() for _ in range(self._between(1, 3))]
            return {
                "type": "array", "prefixItems": firsts, "items": False, "minItems": len(firsts),
            }  # fmt: skip
        least = self._between(0, 2)
        return {
            "type": "array",
            "items": self._any(depth - 1),
            "minItems": least,
            "maxItems": least + self._between(0, 2),
        }

    def _union(self, depth: int) -> Schema:
        kind = self._random.choice(["anyOf", "oneOf"])
        tags = self._random.sample(WORDS, self._between(2, 3))
        return {kind: [self._tagged(tag, depth) for tag in tags]}

    def _tagged(self, tag: str, depth: int) -> Schema:
        return {
            "type": "object",
            "properties": {"kind": {"const": tag}, "value": self._any(depth - 1)},
            "required": ["kind", "value"],
            "additionalProperties": False,
        }

    def _between(self, low: int, high: int) -> int:
        return self._random.randint(low, high)
