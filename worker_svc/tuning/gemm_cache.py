"""Stores GEMM choices on disk for the next start.

One file per device and version of driver and library, in the folder of compiled kernels. An
unreadable file counts as empty. Processes that write at the same time may lose each other's
entries, which are then measured again, but never leave a partial file.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from kernels.gemm.cublas_lt import GemmKind, GemmShape
from worker_svc.device.device import DTYPES
from worker_svc.models.gemm_choices import Choices, GemmChoice

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class GemmCache:
    """The stored choices for one device, driver and library."""

    def __init__(self, folder: Path, key: str) -> None:
        self._key = key
        digest = hashlib.sha256(key.encode()).hexdigest()[:24]
        self._path = folder / f"pagewire-gemms-{digest}.json"

    def read(self) -> Choices:
        """All stored choices; empty if the file is missing or invalid."""
        try:
            found = json.loads(self._path.read_text("utf-8"))
            return load(found["choices"]) if found["key"] == self._key else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def add(self, choices: Choices) -> None:
        """Stores these choices in addition; has no effect if the file cannot be written."""
        text = json.dumps({"key": self._key, "choices": dump({**self.read(), **choices})}, indent=1)
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _replace(self._path, text)


def dump(choices: Choices) -> list[dict[str, Any]]:
    """The choices as a JSON list."""
    return [
        {
            "rows": shape.rows,
            "n": shape.kind.n,
            "k": shape.kind.k,
            "dtype": _NAMES[shape.kind.dtype],
            "adds": shape.kind.adds,
            "algorithm": None if choice.algorithm is None else choice.algorithm.hex(),
            "us": round(choice.us, 3),
            "torch_us": round(choice.torch_us, 3),
        }
        for shape, choice in choices.items()
    ]


def load(entries: list[dict[str, Any]]) -> dict[GemmShape, GemmChoice]:
    """The choices from `dump`'s output. Raises KeyError, TypeError or ValueError otherwise."""
    return {_shape(entry): _choice(entry) for entry in entries}


def _shape(entry: dict[str, Any]) -> GemmShape:
    dtype, adds = DTYPES[entry["dtype"]], bool(entry["adds"])
    return GemmShape(int(entry["rows"]), GemmKind(int(entry["n"]), int(entry["k"]), dtype, adds))


def _choice(entry: dict[str, Any]) -> GemmChoice:
    algorithm = entry["algorithm"]
    return GemmChoice(
        None if algorithm is None else bytes.fromhex(algorithm),
        float(entry["us"]),
        float(entry["torch_us"]),
    )


def _replace(path: Path, text: str) -> None:
    """Replaces the file atomically: readers see either the old or the new content."""
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=path.name, delete=False
    ) as file:
        try:
            file.write(text)
            file.close()
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise
