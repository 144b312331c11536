"""Names of models on a hub: ORG/NAME, and perhaps a revision after an @."""

import re
from dataclasses import dataclass
from pathlib import Path

DEFAULT_REVISION = "main"
_PART = r"[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9_])?"
_NAME = re.compile(
    rf"(?P<repository>{_PART}/{_PART})(?:@(?P<revision>[\w./+-]{{1,200}}))?", re.ASCII
)
FILES = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".json")  # a path, and no name


@dataclass(frozen=True, slots=True)
class ModelName:
    """A repository on a hub, and a branch, tag or commit of it."""

    repository: str
    revision: str = DEFAULT_REVISION

    def __str__(self) -> str:
        at = "" if self.revision == DEFAULT_REVISION else f"@{self.revision}"
        return f"{self.repository}{at}"


def name_in(given: Path) -> ModelName | None:
    """The name that --model spells; None if it cannot be one, or if there is such a path here."""
    return None if given.exists() else parse(str(given))


def parse(text: str) -> ModelName | None:
    """The name that a text spells; None if it cannot be one."""
    found = _NAME.fullmatch(text)
    if found is None or ".." in text or "--" in found["repository"]:
        return None
    if found["repository"].lower().endswith(FILES):
        return None
    return ModelName(found["repository"], found["revision"] or DEFAULT_REVISION)
