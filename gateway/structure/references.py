"""References within a JSON schema. Pure."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote


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
