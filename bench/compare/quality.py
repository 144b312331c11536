"""Quality that narrow numbers cost: perplexity, and how often the best token differs.

    python -m bench.compare.quality kv-cache-dtype [--model FOLDER|FILE] [--text FILE]
    python -m bench.compare.quality quantization [--model FOLDER] [--dtype float32]

The text is computed as a prompt once for each type of cache, or for each value of `--quantization`.
Every token attends to what was stored of those before it, as in the server; where the C kernels
run, inputs of integer weights are rounded, too. Agreement is the share of positions whose most
likely next token is that of the model as it is.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench.harness.records import new_parser
from default_model.folder import ensure
from pagewire.gguf import files
from worker_svc.attention.batch import AttentionBatch
from worker_svc.device.device import DTYPES, KV_DTYPES, resolve_kv_dtype
from worker_svc.models.decoder import Decoder
from worker_svc.models.stored.loading import load_model
from worker_svc.startup import key_offsets

TEXT = Path(__file__).parents[2] / "tests/default_model/prose.txt"
KV_CACHE_DTYPE, QUANTIZATION = "kv-cache-dtype", "quantization"
KINDS = {
    KV_CACHE_DTYPE: ("auto", *(name for name in KV_DTYPES if name != "fp8")),
    QUANTIZATION: ("auto", "int8", "int4"),
}
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Quality:
    """One way to store numbers, on one text."""

    kind: str
    perplexity: float
    agreement: float  # with the model as it is, 0 to 1


def measure(
    option: str, folder: Path, token_ids: Sequence[int], dtype: torch.dtype, device: str = "cpu"
) -> Iterator[Quality]:
    """All kinds of an option, the model as it is first."""
    ids = torch.tensor(token_ids, device=device)
    expected: Tensor | None = None
    for kind in KINDS[option]:
        logits = predictions(_model(option, kind, folder, dtype, ids), ids)  # [T - 1, vocab]
        best = logits.argmax(-1)
        expected = best if expected is None else expected
        loss = torch.nn.functional.cross_entropy(logits, ids[1:])
        yield Quality(kind, float(loss.exp()), float((best == expected).float().mean()))


def _model(option: str, kind: str, folder: Path, dtype: torch.dtype, ids: Tensor) -> Decoder:
    device, length = ids.device, len(ids)
    if option == QUANTIZATION:
        return load_model(folder, dtype, device, length, quantization=kind)
    kv_dtype = resolve_kv_dtype(kind, dtype, device)
    model = load_model(folder, dtype, device, length, kv_dtype=kv_dtype)
    key_offsets.set_offsets(model, length)
    return model


@torch.inference_mode()
def predictions(model: Decoder, ids: Tensor) -> Tensor:
    """Logits of each token after the first of a text, [T - 1, vocab] float32."""
    count, device = len(ids), ids.device
    num_blocks = -(-count // BLOCK_SIZE)
    cache = model.new_cache(1 + num_blocks, BLOCK_SIZE)
    positions = torch.arange(count, device=device)
    batch = AttentionBatch(
        slot_mapping=positions + BLOCK_SIZE,
        block_tables=torch.arange(1, 1 + num_blocks, dtype=torch.int32, device=device)[None],
        context_lens=torch.tensor([count], dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32, device=device),
        max_seqlen_q=count,
        max_context_len=count,
    )
    return model.logits(model.forward(ids, positions, cache, batch)[:-1])


def token_ids_of(folder: Path, text: Path) -> list[int]:
    """The ids of a text, by the tokenizer of a folder or GGUF file. Exits if there is none."""
    stored = files.read_file(folder, "tokenizer.json")
    if stored is None:
        raise SystemExit(f"{folder}: no tokenizer.json")
    ids: list[int] = Tokenizer.from_str(stored.decode("utf-8")).encode(text.read_text("utf-8")).ids
    return ids


def main(arguments: Sequence[str]) -> None:
    """Prints a line of JSON for each kind."""
    parser = new_parser("bench.compare.quality", __doc__)
    parser.add_argument("option", choices=KINDS)
    parser.add_argument("--model", type=Path, help="folder or GGUF file; default: embedded")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = parser.parse_args(arguments)
    folder = given.model or ensure()
    token_ids = token_ids_of(folder, given.text)
    for one in measure(given.option, folder, token_ids, DTYPES[given.dtype], given.device):
        sys.stdout.write(json.dumps({"num_tokens": len(token_ids), **asdict(one)}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
