"""What rounding at load costs in quality: perplexity, and how often the best token differs.

    python -m bench.compare.rounding [--model FOLDER] [--text FILE] [--dtype float32]

The text is computed as a prompt once for each value of `--quantization`. Where the C kernels run,
inputs of integer weights are rounded, too. Agreement is the share of positions whose most likely
next token is that of the model as it is.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from bench.compare.kv_cache_dtype import TEXT, compared
from default_model.folder import ensure
from worker_svc.device.device import DTYPES
from worker_svc.models.stored.loading import load_model

KINDS = ("auto", "int8", "int4")
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class RoundingQuality:
    """One rounding on one text."""

    quantization: str
    perplexity: float
    agreement: float  # with the model as it is, 0 to 1


def measure(folder: Path, token_ids: Sequence[int], dtype: torch.dtype) -> list[RoundingQuality]:
    """All kinds, the model as it is first."""
    ids = torch.tensor(token_ids)
    models = (load_model(folder, dtype, CPU, len(ids), quantization=name) for name in KINDS)
    found = zip(KINDS, compared(models, ids), strict=True)
    return [RoundingQuality(name, *quality) for name, quality in found]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, help="folder; default: embedded")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    options = parser.parse_args(arguments)
    folder = options.model or ensure()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    token_ids = tokenizer.encode(options.text.read_text("utf-8")).ids
    for one in measure(folder, token_ids, DTYPES[options.dtype]):
        sys.stdout.write(json.dumps({"num_tokens": len(token_ids), **asdict(one)}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
