"""Options about adapters: `--lora-modules` in both of its forms, and the limits."""

import json
from dataclasses import dataclass

from wire.adapters import name_problem

_FIELDS = {"name", "path", "base_model_name"}


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """An adapter to be served from the start."""

    name: str
    path: str

    @classmethod
    def parse(cls, text: str) -> "AdapterModule":
        """NAME=PATH, or {"name": ..., "path": ...}. Raises ValueError."""
        if text.lstrip().startswith("{"):
            name, path = _of_json(text)
        else:
            name, found, path = text.partition("=")
            if not found:
                raise ValueError(f"lora_modules: {text!r} is not NAME=PATH")
        if problem := name_problem(name):
            raise ValueError(f"lora_modules: the name {name!r} {problem}")
        if not path:
            raise ValueError(f"lora_modules: {name!r} has no path")
        return cls(name, path)


def _of_json(text: str) -> tuple[str, str]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"lora_modules: {text!r} cannot be read as JSON: {error}") from None
    if strange := sorted(found.keys() - _FIELDS):
        raise ValueError(f"lora_modules: {strange[0]!r} is not supported, name and path are")
    name, path = found.get("name"), found.get("path")
    if not isinstance(name, str) or not isinstance(path, str):
        raise ValueError(f"lora_modules: {text!r} needs a name and a path, both texts")
    return name, path


def check_modules(modules: tuple[AdapterModule, ...]) -> None:
    """Raises ValueError for two modules of one name."""
    names = [module.name for module in modules]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"lora_modules: two are named {name!r}")
