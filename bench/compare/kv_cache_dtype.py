"""What an FP8 KV cache costs in quality: perplexity, and how often the best token differs.

    python -m bench.compare.kv_cache_dtype [--model FOLDER|FILE] [--text FILE] [--dtype float32]

The text is computed as a prompt once for each type of cache. Every token attends to what was stored
of those before it, as in the server. Agreement is the share of positions whose most likely next
token is that of the model's own type.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from default_model.folder import ensure
from pagewire.gguf import files
from worker_svc.attention.batch import AttentionBatch
from worker_svc.device.device import DTYPES, KV_DTYPES, resolve_kv_dtype
from worker_svc.models.decoder import Decoder
from worker_svc.models.stored.loading import load_model
from worker_svc.startup import key_offsets

TEXT = Path(__file__).parents[2] / "tests/default_model/prose.txt"
KINDS = ("auto", *(name for name in KV_DTYPES if name != "fp8"))
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Quality:
    """One type of cache on one text."""

    kv_cache_dtype: str
    perplexity: float
    agreement: float  # with the model's own type, 0 to 1


def measure(
    folder: Path, token_ids: Sequence[int], dtype: torch.dtype, device: torch.device
) -> list[Quality]:
    """All types, the model's own first."""
    ids = torch.tensor(token_ids, device=device)

    def models() -> Iterator[Decoder]:
        for name in KINDS:
            kv_dtype = resolve_kv_dtype(name, dtype, device)
            model = load_model(folder, dtype, device, len(ids), kv_dtype=kv_dtype)
            key_offsets.set_offsets(model, len(ids))
            yield model

    found = zip(KINDS, compared(models(), ids), strict=True)
    return [Quality(name, *quality) for name, quality in found]


def compared(models: Iterable[Decoder], ids: Tensor) -> Iterator[tuple[float, float]]:
    """Each model's perplexity on a text, and the share of positions with the first one's best."""
    expected: Tensor | None = None
    for model in models:
        logits = predictions(model, ids)  # [T - 1, vocab]
        best = logits.argmax(-1)
        expected = best if expected is None else expected
        loss = torch.nn.functional.cross_entropy(logits, ids[1:])
        yield float(loss.exp()), float((best == expected).float().mean())


@torch.inference_mode()
def predictions(model: Decoder, ids: Tensor) -> Tensor:
    """Logits of each token after the first of a text, [T - 1, vocab] float32."""
    count, device = len(ids), ids.device
    num_blocks = -(-count // BLOCK_SIZE)
    cache = model.new_cache(1 + num_blocks, BLOCK_SIZE)
    positions = torch.arange(count, device=device)
    length = torch.tensor([count], dtype=torch.int32, device=device)
    batch = AttentionBatch(
        slot_mapping=positions + BLOCK_SIZE,
        block_tables=torch.arange(1, 1 + num_blocks, dtype=torch.int32, device=device)[None],
        context_lens=length,
        cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32, device=device),
        max_seqlen_q=count,
        max_context_len=count,
    )
    return model.logits(model.forward(ids, positions, cache, batch)[:-1])


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="folder or GGUF file; default: embedded")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(arguments)
    folder = options.model or ensure()
    stored = files.read_file(folder, "tokenizer.json")
    if stored is None:
        raise SystemExit(f"{folder}: no tokenizer.json")
    tokenizer = Tokenizer.from_str(stored.decode("utf-8"))
    token_ids = tokenizer.encode(options.text.read_text("utf-8")).ids
    for one in measure(folder, token_ids, DTYPES[options.dtype], torch.device(options.device)):
        sys.stdout.write(json.dumps({"num_tokens": len(token_ids), **asdict(one)}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
