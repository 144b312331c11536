"""The model that --model names: a folder or a file on this machine, else a folder from a hub."""

from dataclasses import dataclass
from pathlib import Path

from pagewire.hub import names
from pagewire.hub.download import download


@dataclass(frozen=True, slots=True)
class LocatedModel:
    """A model's folder, or its GGUF file."""

    path: Path
    name: str = ""  # for requests; empty: the folder's or the file's


def locate(given: Path, *, with_weights: bool) -> LocatedModel:
    """The model, downloaded now if a hub has it and the cache does not.

    What exists here wins over a name of the same spelling. What is neither is returned as given,
    for the caller to refuse. Raises ModelUnavailable.
    """
    name = names.name_in(given)
    if name is None:
        return LocatedModel(given)
    return LocatedModel(download(name, with_weights=with_weights), name.repository)
