"""The file of --config: options by name, of one command or in a section for each.

Every value is read as the text that stands in the file, as if it stood on the command line.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pagewire.settings.known import OPTIONS

Value = str | list[str]


class BadConfigFile(ValueError):
    """Raised for a file that cannot be read or has a key that is no option; names the key."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The content of a file: sections by command, or one section for the command that reads it."""

    path: Path
    sections: Mapping[str, Mapping[str, Value]]
    is_flat: bool

    def of(self, command: str) -> Mapping[str, Value]:
        """The options of a command, by their long names without dashes."""
        return self.sections.get("" if self.is_flat else command, {})


def read(path: Path) -> ConfigFile:
    """Reads a file. Raises BadConfigFile."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfigFile(f"--config: {path} cannot be read: {error}") from error
    content = _parsed(path, text)
    if content in (None, ""):
        content = {}
    if not isinstance(content, dict):
        raise BadConfigFile(f"--config: {path} holds no options, which are lines `name: value`")
    nested = [key for key, value in content.items() if isinstance(value, dict)]
    if nested:
        # A section may be empty: all its lines may be comments.
        nested = [key for key in content if key in nested or content[key] == ""]
    for key in nested:
        _check_section(path, key)
    if not nested:
        return ConfigFile(path, {"": _section(path, "", content)}, is_flat=True)
    if loose := [key for key in content if key not in nested]:
        raise BadConfigFile(
            f"--config: {path}: {', '.join(loose)}: in a file with sections each option stands in "
            f"one of {', '.join(OPTIONS)}"
        )
    sections = {key: _section(path, key, content[key] or {}) for key in nested}
    return ConfigFile(path, sections, is_flat=False)


def check_keys(file: ConfigFile, command: str) -> None:
    """Raises BadConfigFile for a key that is no option of the command."""
    known = [option for option in OPTIONS[command] if option != "config"]
    for key in file.of(command):
        if key in known:
            continue
        others = [other for other, options in OPTIONS.items() if key in options]
        near = get_close_matches(key, known, n=2)
        hint = f"; it is one of {' and '.join(others)}" if others else ""
        hint = f"; did you mean {' or '.join(near)}?" if near and not others else hint
        raise BadConfigFile(f"--config: {file.path}: {key} is no option of {command}{hint}")


def _check_section(path: Path, key: str) -> None:
    if key not in OPTIONS:
        near = get_close_matches(key, OPTIONS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise BadConfigFile(
            f"--config: {path}: {key} is no section: these are {', '.join(OPTIONS)}{hint}"
        )


def _section(path: Path, command: str, content: Mapping[str, Any]) -> dict[str, Value]:
    where = f"{command}: " if command else ""
    section: dict[str, Value] = {}
    for key, value in content.items():
        name = key.replace("_", "-")
        if name in section:
            raise BadConfigFile(f"--config: {path}: {where}{name} stands there twice")
        entries = value if isinstance(value, list) else [value]
        if not all(isinstance(entry, str) for entry in entries):
            raise BadConfigFile(f"--config: {path}: {where}{name} is neither a value nor a list")
        section[name] = value
    return section


def _parsed(path: Path, text: str) -> Any:
    try:
        import yaml  # noqa: PLC0415 - the SDK comes without it
    except ImportError:
        raise BadConfigFile("--config needs PyYAML, which this Python lacks") from None

    class Reader(yaml.BaseLoader):  # type: ignore[misc]  # scalars stay text: 0123 and on mean what they say
        """Refuses a key that stands twice in one mapping."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            keys = [key.value for key, _ in node.value if isinstance(key.value, str)]
            if twice := [key for key in keys if keys.count(key) > 1]:
                raise BadConfigFile(f"--config: {path}: {twice[0]} stands there twice")
            built: dict[Hashable, Any] = super().construct_mapping(node, deep)
            return built

    try:
        return yaml.load(text, Reader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "it is not YAML"
        raise BadConfigFile(f"--config: {path}{where}: {problem}") from error
