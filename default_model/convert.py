"""Converts one GGUF file to one Hugging Face folder.

It writes into a folder that no other process uses yet. The caller does caching, locking and
renaming.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader

from default_model.files import (
    DurableFile,
    FileEntry,
    damage,
    sync_folder,
    write_manifest,
    write_text,
)
from default_model.llama import Tensor, config, special_ids, tensors
from default_model.source import DefaultModelError, GgufSource
from default_model.tokenizer import tokenizer, tokenizer_config

SPARE_BYTES = 16 << 20  # for tokenizer, configuration and the file system
PROGRESS_PERCENT = 20
WEIGHTS = "weights: "  # how the lines begin that only tell how far it is

Progress = Callable[[str], None]


def fill(gguf: GgufSource, folder: Path, progress: Progress) -> None:
    """Writes the model, under its name, and the manifest to a folder, synced to disk."""
    reader = _open(gguf.path)
    model_config = config(reader)
    weights = tensors(reader)
    num_bytes = sum(w.num_bytes for w in weights)
    progress(
        f"converting {gguf.model_name} to {num_bytes >> 20} MiB of safetensors; this happens once"
    )
    _require_space(folder, num_bytes + SPARE_BYTES)
    model = folder / gguf.model_name
    model.mkdir()
    texts = {
        "config.json": _json(model_config),
        "generation_config.json": _json(dict(special_ids(reader))),
        "tokenizer.json": tokenizer(reader).to_str(pretty=True),
        "tokenizer_config.json": _json(tokenizer_config(reader)),
    }
    entries = {name: write_text(model / name, text) for name, text in texts.items()}
    entries["model.safetensors"] = _write_weights(model / "model.safetensors", weights, progress)
    write_manifest(folder, {f"{gguf.model_name}/{name}": e for name, e in entries.items()})
    sync_folder(model)
    progress("verifying what was written")
    reason = damage(folder, hashes=True)
    if reason is not None:
        raise DefaultModelError(f"the disk of {folder.parent} lost what it was given: {reason}")


def safetensors_header(weights: Sequence[Tensor]) -> bytes:
    """The header of a safetensors file of float32 tensors, whose data follows in this order."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in weights:
        begin, end = end, end + weight.num_bytes
        table[weight.name] = {"dtype": "F32", "shape": weight.shape, "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the data
    return len(text).to_bytes(8, "little") + text


def _open(path: Path) -> GGUFReader:
    try:
        return GGUFReader(path)
    except (ValueError, IndexError) as error:
        raise DefaultModelError(f"{path} is not a whole GGUF file: {error}") from error


def _require_space(folder: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise DefaultModelError(
            f"{folder.parent} has {free_bytes >> 20} MiB free and the default model needs "
            f"{needed_bytes >> 20} MiB: make room or set PAGEWIRE_CACHE"
        )


def _write_weights(path: Path, weights: Sequence[Tensor], progress: Progress) -> FileEntry:
    # One tensor at a time: the whole model is never in memory.
    total_bytes = sum(weight.num_bytes for weight in weights)
    written_bytes, next_percent = 0, PROGRESS_PERCENT
    with DurableFile(path) as file:
        file.write(safetensors_header(weights))
        for weight in weights:
            dense = weight.load()
            if dense.shape != weight.shape:
                raise DefaultModelError(f"{weight.name} is {dense.shape}, not {weight.shape}")
            file.write(np.ascontiguousarray(dense, dtype="<f4").tobytes())
            written_bytes += weight.num_bytes
            percent = 100 * written_bytes // total_bytes
            if percent >= next_percent:
                progress(f"{WEIGHTS}{percent} % of {total_bytes >> 20} MiB")
                next_percent = percent - percent % PROGRESS_PERCENT + PROGRESS_PERCENT
    return file.entry


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
