"""Finds the files of a model's weights: one, or those that an index names, tensor by tensor.

The one place that reads an index; what downloads weights and what loads them ask here.
"""

import json
from pathlib import Path, PurePosixPath

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SUFFIX = ".safetensors"


class BadIndex(ValueError):
    """An index cannot be read, or names a file that is none of its folder; the message says so."""


def file_of_each_tensor(index: Path) -> dict[str, str]:
    """The file's name by the tensor's. Raises BadIndex."""
    try:
        content = json.loads(index.read_bytes())
        files = content["weight_map"].items()
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise BadIndex(f"{index} is no index of weights, fetch it again") from error
    for name, file in files:
        if not _is_inside(file):
            raise BadIndex(f"{index}: {name} is in {file!r}, which names no {SUFFIX} file there")
    return dict(files)


def _is_inside(file: object) -> bool:
    """True if this names a file of the index's own folder or of one in it."""
    if not isinstance(file, str) or "\\" in file or "\0" in file:
        return False
    path = PurePosixPath(file)
    return path.suffix == SUFFIX and not path.is_absolute() and ".." not in path.parts
