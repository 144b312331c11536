"""GGUF files, whose tensors say themselves how they are stored: see `models.stored.gguf`."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from pagewire.gguf.architecture import EXPERT_DOWN, EXPERT_GATE, EXPERT_UP
from pagewire.gguf.blocks import MXFP4
from pagewire.gguf.header import GgufHeader, read_header
from worker_svc.quantization.scheme import Scheme, UnsupportedQuantization


@dataclass(frozen=True, slots=True)
class GgufTypes:
    """The types of a file's tensors."""

    label: str  # gguf Q4_1, Q8_0, F32
    mxfp4_layers: frozenset[int] = frozenset()  # whose experts are all in MXFP4

    @classmethod
    def of(cls, path: Path) -> "GgufTypes":
        """The tensor types of a file, the one with the most bytes first. Raises BadGguf."""
        sizes: Counter[str] = Counter()
        header = read_header(path)
        for tensor in header.tensors.values():
            sizes[tensor.type_name] += tensor.num_bytes
        label = "gguf " + ", ".join(name for name, _ in sizes.most_common())
        return cls(label, _mxfp4_layers(header))

    def scheme(self, name: str) -> Scheme:
        """Raises UnsupportedQuantization: no safetensors hold such weights."""
        raise UnsupportedQuantization(
            f"quantization: {self.label} is not that of a folder ({name})"
        )


def _mxfp4_layers(header: GgufHeader) -> frozenset[int]:
    """The layers whose experts are all in MXFP4."""
    parts: dict[int, set[str]] = {}
    for name, tensor in header.tensors.items():
        match name.split("."):
            case ["blk", layer, kind, "weight"] if kind in (EXPERT_GATE, EXPERT_UP, EXPERT_DOWN):
                parts.setdefault(int(layer), set()).add(tensor.type_name)
    return frozenset(layer for layer, types in parts.items() if types == {MXFP4})
