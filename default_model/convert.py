"""Converts one GGUF file to one Hugging Face folder, for programs that read no GGUF.

It writes into a folder that no other process uses yet. The caller does caching, locking and
renaming.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import numpy as np

from default_model.files import (
    DurableFile,
    FileEntry,
    damage,
    sync_folder,
    write_manifest,
    write_text,
)
from default_model.source import DefaultModelError, GgufSource
from pagewire.gguf.blocks import StoredTensor
from pagewire.gguf.files import CONTENTS, read_file
from pagewire.gguf.header import BadGguf, read_header
from pagewire.gguf.stored import stored_weights

SPARE_BYTES = 16 << 20  # for tokenizer, configuration and the file system
PROGRESS_PERCENT = 20
WEIGHTS = "weights: "  # how the lines begin that only tell how far it is

Progress = Callable[[str], None]


def fill(gguf: GgufSource, folder: Path, progress: Progress) -> None:
    """Writes the model, under its name, and the manifest to a folder, synced to disk."""
    texts, tensors = _read(gguf.path)
    num_bytes = sum(map(_num_bytes, tensors.values()))
    progress(
        f"converting {gguf.model_name} to {num_bytes >> 20} MiB of safetensors; this happens once"
    )
    _require_space(folder, num_bytes + SPARE_BYTES)
    model = folder / gguf.model_name
    model.mkdir()
    entries = {name: write_text(model / name, text) for name, text in texts.items()}
    entries["model.safetensors"] = _write_weights(model / "model.safetensors", tensors, progress)
    write_manifest(folder, {f"{gguf.model_name}/{name}": e for name, e in entries.items()})
    sync_folder(model)
    progress("verifying what was written")
    reason = damage(folder, hashes=True)
    if reason is not None:
        raise DefaultModelError(f"the disk of {folder.parent} lost what it was given: {reason}")


def safetensors_header(tensors: Mapping[str, StoredTensor]) -> bytes:
    """The header of a safetensors file of float32 tensors, whose data follows in this order."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, stored in tensors.items():
        begin, end = end, end + _num_bytes(stored)
        shape = stored.tensor.shape
        table[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the data
    return len(text).to_bytes(8, "little") + text


def _read(path: Path) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    """The small files by name, and the tensors by theirs."""
    try:
        texts = {name: (read_file(path, name) or b"").decode() for name in CONTENTS}
        tensors = stored_weights(read_header(path))
    except BadGguf as error:
        raise DefaultModelError(str(error)) from error
    return texts, tensors


def _num_bytes(stored: StoredTensor) -> int:
    # float32, since no smaller type is exact: a Q4_1 weight is a half-precision scale times an
    # integer plus a half-precision offset. Of these sums float16 would change 42 %, bfloat16 79 %.
    return prod(stored.tensor.shape) * 4


def _require_space(folder: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise DefaultModelError(
            f"{folder.parent} has {free_bytes >> 20} MiB free and the default model needs "
            f"{needed_bytes >> 20} MiB: make room or set PAGEWIRE_CACHE"
        )


def _write_weights(
    path: Path, tensors: Mapping[str, StoredTensor], progress: Progress
) -> FileEntry:
    # One tensor at a time: the whole model is never in memory.
    total_bytes = sum(map(_num_bytes, tensors.values()))
    written_bytes, next_percent = 0, PROGRESS_PERCENT
    with DurableFile(path) as file:
        file.write(safetensors_header(tensors))
        for stored in tensors.values():
            file.write(np.ascontiguousarray(stored.dense(), dtype="<f4").tobytes())
            written_bytes += _num_bytes(stored)
            percent = 100 * written_bytes // total_bytes
            if percent >= next_percent:
                progress(f"{WEIGHTS}{percent} % of {total_bytes >> 20} MiB")
                next_percent = percent - percent % PROGRESS_PERCENT + PROGRESS_PERCENT
    return file.entry
