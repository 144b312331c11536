"""References within a JSON schema. Pure."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from gateway.structure.keywords import NOTES, is_vendor

DEFINITIONS = ("$defs", "definitions")
MAX_STEPS = 8  # from reference to reference


def resolve(reference: Any, root: Any) -> Any:
    """The part of the root that a reference names by its JSON pointer; None if there is none."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    part = root
    for step in reference.split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(part, Mapping) and name in part:
            part = part[name]
        elif isinstance(part, list) and name.isdecimal() and int(name[:9]) < len(part):
            part = part[int(name[:9])]
        else:
            return None
    return part


def followed(schema: Any) -> Any:
    """The schema that a bare reference, or a combination of one part, stands for."""
    shared = {key: schema[key] for key in DEFINITIONS if key in schema}
    part = schema
    for _ in range(MAX_STEPS):
        keys = {key for key in part if not (key in NOTES or key in DEFINITIONS or is_vendor(key))}
        if keys == {"$ref"}:
            found = resolve(part["$ref"], schema)
        elif keys == {"allOf"} and isinstance(part["allOf"], list) and len(part["allOf"]) == 1:
            found = part["allOf"][0]
        else:
            break
        if not isinstance(found, Mapping):
            break
        part = shared | dict(found)
    return part
