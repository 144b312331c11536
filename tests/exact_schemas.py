"""Random schemas with numbers that a double rounds, each with a value that fits."""

import random
from collections.abc import Callable
from decimal import Decimal
from typing import Any

Schema = dict[str, Any]
Made = tuple[Any, Any]  # a schema, and a value that fits

CENTRES = [2**53, 2**63, 2**64, 10**15, 10**18, 10**30, 1234567890123456789, 99 * 10**20 + 7]


class Maker:
    """Makes one schema after another from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.definitions: Schema = {}

    def root(self) -> Made:
        """A schema, with its definitions."""
        self.definitions = {}
        schema, value = self._any(self.random.randint(1, 3))
        if self.definitions and isinstance(schema, dict):
            schema = schema | {"$defs": self.definitions}
        return schema, value

    def number(self) -> int:
        """A number near one where something ends."""
        centre = self.random.choice(CENTRES) + self.random.randint(-3, 3)
        return centre if self.random.random() < 0.6 else -centre

    def _any(self, depth: int) -> Made:
        makers: list[Callable[[int], Made]] = [self._leaf]
        if depth > 0:
            makers = [self._object, self._map, self._tuple, self._list, self._union, self._both]
            makers += [self._reference, self._pattern, self._leaf, self._denied]
        return self.random.choice(makers)(depth - 1)

    def _leaf(self, depth: int) -> Made:
        makers = [self._const, self._enum, self._integer, self._integer, self._real, self._multiple]
        return self.random.choice(makers)()

    def _const(self) -> Made:
        value: Any = self.random.choice([self.number(), [self.number(), "x"], {"a": self.number()}])
        return {"const": value}, value

    def _enum(self) -> Made:
        values: list[Any] = [self.number() for _ in range(self.random.randint(1, 4))]
        values += self.random.choice([[], ["a", None], [1, 2.5], [1e18], [[self.number()]]])
        self.random.shuffle(values)
        kinds: Schema = {} if self.random.random() < 0.7 else {"type": ["integer", "number"]}
        fitting = [one for one in values if not kinds or isinstance(one, (int, float))]
        return kinds | {"enum": values}, self.random.choice(fitting)

    def _integer(self) -> Made:
        number = self.number()
        kinds = [("minimum", 0), ("exclusiveMinimum", 1), ("maximum", 0), ("exclusiveMaximum", -1)]
        kind, step = self.random.choice(kinds)
        schema: Schema = {"type": "integer", kind: number}
        if self.random.random() < 0.5:
            other = "maximum" if "inimum" in kind else "minimum"
            width = self.random.choice([1, 2, 10, 10**9, 10**19])
            schema[other] = number + (width if other == "maximum" else -width)
        return schema, number + step

    def _real(self) -> Made:
        number = self.number()
        low = self.random.choice([number, float(number), 0.1, -2.5, 1e18, 123456789.25])
        schema: Schema = {"type": "number", "minimum": low, "maximum": low + 10**40}
        exact = Decimal(repr(low)) if isinstance(low, float) else Decimal(low)
        return schema, exact

    def _multiple(self) -> Made:
        kinds = [10**18, 5 * 10**17, 2**53, 2**53 + 1, 10**30, 3, 0.01, 0.5, 0.07, 1e18, 86400]
        step = self.random.choice(kinds)
        exact = Decimal(repr(step)) if isinstance(step, float) else Decimal(step)
        schema: Schema = {"type": "number", "multipleOf": step}
        if self.random.random() < 0.6:
            schema |= {"minimum": 0, "maximum": self.random.choice([10, 10**6, 10**20])}
        if self.random.random() < 0.3:
            return {"allOf": [schema, {"multipleOf": 1}]}, 0
        is_short = "maximum" not in schema or exact <= schema["maximum"]
        return schema, exact if is_short else 0

    def _object(self, depth: int) -> Made:
        names = self.random.sample(["a", "b", "id", "1234567890123456789", "n e", 'q"'], 3)
        made = {name: self._any(depth) for name in names}
        required = [name for name in names if self.random.random() < 0.5]
        schema: Schema = {
            "type": "object",
            "properties": {name: part for name, (part, _) in made.items()},
            "required": required,
            "additionalProperties": False,
        }
        given = [name for name in names if name in required or self.random.random() < 0.5]
        return schema, {name: made[name][1] for name in given}

    def _map(self, depth: int) -> Made:
        part, value = self._any(depth)
        schema: Schema = {"type": "object", "additionalProperties": part}
        if self.random.random() < 0.3:
            schema["propertyNames"] = {"enum": ["x", "y", "9007199254740993"]}
        return schema, {"x": value}

    def _pattern(self, depth: int) -> Made:
        part, value = self._any(depth)
        patterns = {"^x_[a-z]{1,3}$": part}
        schema: Schema = {"type": "object", "patternProperties": patterns}
        return schema | {"additionalProperties": False}, {"x_ab": value}

    def _tuple(self, depth: int) -> Made:
        made = [self._any(depth) for _ in range(2)]
        schema: Schema = {"type": "array", "prefixItems": [part for part, _ in made]}
        schema |= {"items": False, "minItems": self.random.randint(0, 2)}
        return schema, [value for _, value in made]

    def _list(self, depth: int) -> Made:
        part, value = self._any(depth)
        least = self.random.randint(0, 2)
        schema: Schema = {"type": "array", "items": part, "minItems": least, "maxItems": least + 1}
        return schema, [value] * (least + 1)

    def _union(self, depth: int) -> Made:
        made = [self._any(depth), ({"type": "null"}, None)]
        kind = self.random.choice(["anyOf", "oneOf"])
        return {kind: [part for part, _ in made]}, made[0][1]

    def _both(self, depth: int) -> Made:
        number = self.number()
        bounds = [{"minimum": number - 7}, {"type": "integer", "exclusiveMaximum": number + 1}]
        return {"allOf": bounds}, number

    def _denied(self, depth: int) -> Made:
        number = self.number()
        return {"type": "integer", "not": {"enum": [number, number + 2]}}, number + 1

    def _reference(self, depth: int) -> Made:
        part, value = self._any(depth)
        name = f"D{len(self.definitions)}"
        self.definitions[name] = part
        return {"$ref": f"#/$defs/{name}"}, value
