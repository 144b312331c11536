"""The safetensors of a checkpoint: which files are read, and which of their tensors count.

One file counts whole. Of several a tensor counts only in the file that the index names for it.
"""

import logging
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagewire.hub.weights_index import INDEX, SINGLE, BadIndex, file_of_each_tensor

logger = logging.getLogger(__name__)


class WeightError(ValueError):
    """The checkpoint does not match the model."""


class MissingWeight(WeightError):
    """A parameter is not in the checkpoint."""


class UnreadableWeights(WeightError):
    """A file of the checkpoint is damaged or cut off."""


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file of a checkpoint while it is open."""

    path: Path
    tensors: Any
    names: Collection[str]  # of the tensors in it that count
    lacking: Collection[str]  # that the index promises, and the file has not
    unnamed: Collection[str]  # that it has, and the index does not name for it

    def require_promised(self, is_ignored: Callable[[str], bool]) -> None:
        """Raises MissingWeight if it lacks what the index promises, but for what is ignored."""
        for name in self.lacking:
            if not is_ignored(name):
                raise MissingWeight(f"{name} not found in {self.path}, where {INDEX} says it is")


class WeightFiles:
    """The files of a folder. Raises MissingWeight for one that is absent, or UnreadableWeights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of: dict[str, Path] | None = None  # None: one file, which counts whole
        self.paths = [folder / SINGLE]
        if not (folder / SINGLE).exists() and (folder / INDEX).exists():
            self._file_of = {name: folder / file for name, file in _indexed(folder).items()}
            self.paths = sorted(set(self._file_of.values()))
        for path in self.paths:
            if not path.is_file():
                raise MissingWeight(
                    f"{path} does not exist; weights are read from safetensors only"
                )

    def warn_of_others(self) -> None:
        """Says in the log when an index names other files than the one that is read."""
        if self._file_of is not None or not (self.folder / INDEX).exists():
            return
        try:
            others = set(_indexed(self.folder).values()) - {SINGLE}
        except UnreadableWeights:
            others = {"files that cannot be told"}
        if others:
            logger.warning(
                "%s: %s is read; %s, which names %s, is not",
                self.folder,
                SINGLE,
                INDEX,
                ", ".join(sorted(others)[:3]),
            )

    def names(self) -> set[str]:
        """Names of all tensors, also of those that an index promises in vain."""
        return {name for file in self.opened() for name in (*file.names, *file.lacking)}

    def opened(self) -> Iterator[OpenFile]:
        """Each file in turn, in a fixed order, open until the next. Raises UnreadableWeights."""
        for path in self.paths:
            with self.open(path) as file:
                yield file

    @contextmanager
    def open(self, path: Path) -> Iterator[OpenFile]:
        """One of the files. Raises UnreadableWeights."""
        try:
            with safe_open(path, framework="pt", device="cpu") as tensors:
                found = list(tensors.keys())
                if self._file_of is None:
                    yield OpenFile(path, tensors, found, (), ())
                    return
                promised = [name for name, file in self._file_of.items() if file == path]
                names = [name for name in found if self._file_of.get(name) == path]
                lacking = sorted(set(promised).difference(found))
                unnamed = sorted(set(found).difference(names))
                yield OpenFile(path, tensors, names, lacking, unnamed)
        except SafetensorError as error:
            size = path.stat().st_size
            raise UnreadableWeights(
                f"{path} ({size} bytes) is damaged or cut off, fetch it again: {error}"
            ) from error


def read_matching(folder: Path, names: re.Pattern[str]) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the checkpoint with such a name, in a fixed order. Raises WeightError."""
    for file in WeightFiles(folder).opened():
        for name in file.names:
            if names.fullmatch(name):
                yield name, file.tensors.get_tensor(name)


def _indexed(folder: Path) -> dict[str, str]:
    try:
        return file_of_each_tensor(folder / INDEX)
    except BadIndex as error:
        raise UnreadableWeights(str(error)) from error
