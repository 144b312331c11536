"""GGUF files, whose tensors say themselves how they are stored: see `models.stored.gguf`."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from pagewire.gguf.header import read_header
from worker_svc.quantization.scheme import Scheme, UnsupportedQuantization


@dataclass(frozen=True, slots=True)
class GgufTypes:
    """The types of a file's tensors."""

    label: str  # gguf Q4_1, Q8_0, F32

    @classmethod
    def of(cls, path: Path) -> "GgufTypes":
        """Those of a file, the one with the most bytes first. Raises BadGguf."""
        sizes: Counter[str] = Counter()
        for tensor in read_header(path).tensors.values():
            sizes[tensor.type_name] += tensor.num_bytes
        return cls("gguf " + ", ".join(name for name, _ in sizes.most_common()))

    def scheme(self, name: str) -> Scheme:
        """Raises UnsupportedQuantization: no safetensors hold such weights."""
        raise UnsupportedQuantization(
            f"quantization: {self.label} is not that of a folder ({name})"
        )
