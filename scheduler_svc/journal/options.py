"""Options of a recording: where to, how much of it, and with or without prompts."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_RECORD_OPTIONS = ("record", "record_max_mib", "record_prompts")
MIN_MIB = 8


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """The folder to record in, the most to keep, and whether to keep prompts."""

    folder: Path
    max_mib: int
    keeps_prompts: bool

    def __post_init__(self) -> None:
        if self.max_mib < MIN_MIB:
            raise ValueError(f"--record-max-mib is {self.max_mib}, must be at least {MIN_MIB}")


def add_record_options(parser: argparse.ArgumentParser) -> None:
    """Adds the three options of a recording."""
    parser.add_argument(
        "--record", type=Path, metavar="DIR", help="record every decision, for pagewire replay"
    )
    parser.add_argument(
        "--record-max-mib",
        type=int,
        help="most MiB of a recording, by default 256; its oldest part is cut off",
    )
    parser.add_argument(
        "--record-prompts",
        choices=("replace", "keep"),
        help="replace token ids by meaningless ones (default), or keep them",
    )


def take_record_options(options: dict[str, Any]) -> RecordOptions | None:
    """Removes the three recording options from `options` and returns them as one value.

    Raises ValueError when a recording option is given without --record.
    """
    folder, max_mib, prompts = (options.pop(name) for name in _RECORD_OPTIONS)
    if folder is None:
        if max_mib is not None or prompts is not None:
            raise ValueError("--record-max-mib and --record-prompts need --record DIR")
        return None
    return RecordOptions(folder, 256 if max_mib is None else max_mib, prompts == "keep")
