"""A schema with its references: what they lead to, and where numbers would be rounded. Pure."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from gateway.structure import keywords
from gateway.structure.exact.failures import NotWritten
from gateway.structure.exact.numbers import plain, rounded_keywords

_COMBINERS = frozenset({"$ref", "anyOf", "oneOf"})
MAX_STEPS = 50_000  # schemas that are looked at, each as often as it is; a second's work
_OUTSIDE = frozenset({"$defs", "definitions", "$id", "$anchor"})


class SchemaDocument:
    """One schema as a whole, in the keywords that the grammar library knows."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._combines = any(map(_combines, schemas_in(root)))
        self._rounded_references: set[str] | None = None
        self._num_steps = 0

    def resolve(self, reference: Any) -> Any:
        """The schema that a reference leads to. Raises NotWritten for one that is no pointer."""
        if not isinstance(reference, str) or not f"{reference}/".startswith("#/"):
            raise NotWritten(f"the reference {reference!r:.64} is not followed here")
        found = self.root
        for step in unquote(reference).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                found = found.get(name) if isinstance(found, dict) else None
        if not isinstance(found, dict | bool):
            raise NotWritten(f"the reference {reference!r:.64} leads to no schema")
        return found

    def is_rounded(self) -> bool:
        """True if the grammar library would change a number anywhere."""
        return any(map(self.rounds, schemas_in(self.root)))

    def rounds(self, schema: Mapping[str, Any]) -> bool:
        """True if the grammar library would change a number of a schema, those inside left out."""
        return any(rounded_keywords(schema, combines=self._combines))

    def needs_exactness(self, schema: Any) -> bool:
        """True if a number would change in a schema or in what its references lead to."""
        if self._rounded_references is None:
            self._rounded_references = self._find_rounded_references()
        return any(
            self.rounds(part) or part.get("$ref") in self._rounded_references
            for part in self._counted(schema)
        )

    def spend(self, num_steps: int) -> None:
        """Counts work. Raises NotWritten when it is too much."""
        self._num_steps += num_steps
        if self._num_steps > MAX_STEPS:
            raise NotWritten("its parts lead to each other in too many ways")

    def _counted(self, schema: Any) -> Iterator[dict[str, Any]]:
        for part in schemas_in(schema):
            self.spend(1)
            yield part

    def closed(self, schema: Any) -> Any:
        """The same schema as a document of its own. Raises NotWritten."""
        names: dict[Any, str] = {}
        definitions: dict[str, Any] = {}
        closed = self._renamed(schema, names)
        while len(definitions) < len(names):
            for reference in list(names)[len(definitions) :]:
                definitions[names[reference]] = self._renamed(self.resolve(reference), names)
        return closed | {"$defs": definitions} if definitions else closed

    def _renamed(self, schema: Any, names: dict[Any, str]) -> Any:
        """A schema with references to names that are numbered as they come."""
        if not isinstance(schema, dict):
            return schema
        own = {name: value for name, value in plain(schema).items() if name not in _OUTSIDE}
        for name, value in own.items():
            if name == "$ref":
                own[name] = f"#/$defs/{names.setdefault(value, f'd{len(names)}')}"
            elif name in keywords.MAPS:
                own[name] = {key: self._renamed(part, names) for key, part in value.items()}
            elif name in keywords.LISTS:
                own[name] = [self._renamed(part, names) for part in value]
            elif name in keywords.SINGLE:
                own[name] = self._renamed(value, names)
        return own

    def _find_rounded_references(self) -> set[str]:
        led_to_by: dict[str, set[str]] = defaultdict(set)
        inside: dict[int, tuple[bool, set[str]]] = {}  # of a schema that is led to
        todo: list[str] = []
        for reference in {str(one["$ref"]) for one in schemas_in(self.root) if "$ref" in one}:
            schema = self.resolve(reference)
            if id(schema) not in inside:
                parts = list(self._counted(schema))
                others = {str(part["$ref"]) for part in parts if "$ref" in part}
                inside[id(schema)] = any(map(self.rounds, parts)), others
            is_rounded, others = inside[id(schema)]
            for other in others:
                led_to_by[other].add(reference)
            todo += [reference] if is_rounded else []
        found = set(todo)
        while todo:
            new = led_to_by[todo.pop()] - found
            found |= new
            todo += new
        return found


def schemas_in(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and all inside, definitions too, without `true` and `false`."""
    todo = [schema]
    while todo:
        part = todo.pop()
        if not isinstance(part, dict):
            continue
        yield part
        for name, value in part.items():
            if name in keywords.MAPS and isinstance(value, dict):
                todo += value.values()
            elif name in keywords.LISTS and isinstance(value, list):
                todo += value
            elif name in keywords.SINGLE:
                todo += value if isinstance(value, list) else [value]


def _combines(schema: Mapping[str, Any]) -> bool:
    """True if a schema is the intersection of several."""
    own = plain(schema).keys() - _OUTSIDE - {"type"}
    if "allOf" in own or {"properties", "patternProperties"} <= own:
        return True
    return bool(_COMBINERS & own) and len(own) > 1
