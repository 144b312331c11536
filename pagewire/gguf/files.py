"""The small files of a model by name: those of its folder, or what other files say instead.

The one place that knows the forms of a model; all others ask here for `config.json` and the like.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pagewire.gguf import model_config, tokenizer
from pagewire.gguf.header import GgufHeader, read_header
from pagewire.ranks import files as ranked

SUFFIX = ".gguf"
# At the end of a file's name: how the weights are stored, which is no part of the model's name.
FORMAT = re.compile(r"[.-](?:I?Q\d\w*|BF16|F16|F32)$", re.IGNORECASE)

CONTENTS: dict[str, Callable[[GgufHeader], dict[str, Any]]] = {
    "config.json": model_config.config,
    "generation_config.json": model_config.generation_config,
    "tokenizer.json": tokenizer.tokenizer,
    "tokenizer_config.json": tokenizer.tokenizer_config,
}


def is_gguf(model: Path) -> bool:
    """True if this is a GGUF file, by its name, and no folder."""
    return model.suffix.lower() == SUFFIX and not model.is_dir()


def read_file(model: Path, name: str) -> bytes | None:
    """The content of a file of a model's folder, or what it would be for a GGUF file.

    A folder's tokenizer may be of another kind. None if the model has none of that name. Raises
    BadGguf, BadRanks, or OSError.
    """
    if is_gguf(model):
        content = CONTENTS.get(name)
        return None if content is None else _json(content(read_header(model)))
    path = model / name
    return path.read_bytes() if path.is_file() else ranked.read(model, name)


def file_in(model: Path, name: str) -> Path:
    """The path to name in a message about a file of a model."""
    return model if is_gguf(model) else model / name


def model_name(model: Path) -> str:
    """The name in requests of a model that is found under this path: the folder's or the file's."""
    if not is_gguf(model):
        return model.resolve().name
    return FORMAT.sub("", model.name[: -len(SUFFIX)])


def _json(content: dict[str, Any]) -> bytes:
    # The same bytes on every machine: gateway and worker compare hashes.
    return (json.dumps(content, ensure_ascii=False) + "\n").encode()
