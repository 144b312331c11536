"""The option of the disk tier, `--disk-tier PATH:GIB`."""

import math
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DiskTierOption:
    """A folder, and how many GiB of it may be used."""

    path: Path
    gib: float

    def __str__(self) -> str:
        return f"{self.path}:{self.gib:g}"

    @classmethod
    def parse(cls, text: str) -> "DiskTierOption":
        """PATH:GIB. Raises ValueError."""
        path, found, size = text.rpartition(":")
        try:
            gib = float(size)
        except ValueError:
            gib = math.nan
        if not found or not path or not 0 < gib < math.inf:
            raise ValueError(f"disk_tier: {text!r} is not PATH:GIB, with GIB above 0")
        return cls(Path(path), gib)
