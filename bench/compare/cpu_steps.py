"""CPU: whole steps of a model, layers and head, by dtype and `--quantization`.

    python -m bench.compare.cpu_steps [--rows 1 8 16] [--kinds bfloat16 bfloat16:int8] [--isa avx2]

Every row is a sequence that decodes its next token at the same context; negative rows are a prompt
of that length, without the head. One thread computes and only its CPU time counts, so that other
processes have little effect; the kinds take turns, step by step. The least and the median are
printed.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from default_model.folder import ensure
from kernels.cpu import isa
from worker_svc.attention.batch import AttentionBatch
from worker_svc.device.device import DTYPES
from worker_svc.models.stored.loading import load_model

BLOCK_SIZE = 16
KINDS = ("bfloat16", "float32", "bfloat16:int8", "bfloat16:int4")


@dataclass(frozen=True, slots=True)
class StepTiming:
    """One kind of step; CPU time."""

    kind: str
    rows: int
    least_ms: float
    median_ms: float


class TimedModel:
    """A model with a cache for `rows` sequences of `context` tokens."""

    def __init__(self, folder: Path, kind: str, rows: int, context: int) -> None:
        dtype, _, quantization = kind.partition(":")
        self._model = load_model(
            folder, DTYPES[dtype], torch.device("cpu"), context, quantization=quantization or "auto"
        )
        self._cache = self._model.new_cache(1 + rows * -(-context // BLOCK_SIZE), BLOCK_SIZE)

    def step_ms(self, ends: Sequence[int], num_new: int) -> float:
        """Sequences with these numbers of tokens, `num_new` of them new in each."""
        width = -(-max(ends) // BLOCK_SIZE)
        tables = 1 + torch.arange(len(ends) * width, dtype=torch.int32).view(len(ends), width)
        positions = torch.stack([torch.arange(end - num_new, end) for end in ends])
        slots = tables.gather(1, positions // BLOCK_SIZE).long() * BLOCK_SIZE
        batch = AttentionBatch(
            slot_mapping=(slots + positions % BLOCK_SIZE).flatten(),
            block_tables=tables,
            context_lens=torch.tensor(ends, dtype=torch.int32),
            cu_seqlens_q=num_new * torch.arange(len(ends) + 1, dtype=torch.int32),
            max_seqlen_q=num_new,
            max_context_len=max(ends),
        )
        return self._timed_ms(torch.arange(positions.numel()) + 100, positions.flatten(), batch)

    @torch.inference_mode()
    def _timed_ms(self, ids: Tensor, positions: Tensor, batch: AttentionBatch) -> float:
        began_s = time.thread_time()
        hidden = self._model.forward(ids, positions, self._cache, batch)
        if batch.max_seqlen_q == 1:
            self._model.logits(hidden)
        return 1e3 * (time.thread_time() - began_s)


def measure(
    models: dict[str, TimedModel], rows: int, context: int, rounds: int
) -> list[StepTiming]:
    """Times all kinds in turn."""
    ends, num_new = ([context] * rows, 1) if rows > 0 else ([-rows], -rows)
    times_ms: dict[str, list[float]] = {kind: [] for kind in models}
    for _ in range(rounds):
        for kind, model in models.items():
            times_ms[kind].append(model.step_ms(ends, num_new))
    return [
        StepTiming(kind, rows, round(min(found), 2), round(statistics.median(found), 2))
        for kind, found in times_ms.items()
    ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, help="folder; default: embedded")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--kinds", nargs="+", default=KINDS, help="dtype, or dtype:quantization")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--isa", default="", help="instruction set; default: the fastest")
    parser.add_argument("--rounds", type=int, default=12, help="steps of each kind")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints a JSON line for each kind and number of rows."""
    options = parse(arguments)
    os.environ[isa.VARIABLE] = options.isa
    torch.set_num_threads(1)
    folder, context = options.model or ensure(), options.context
    most, longest = max(1, *options.rows), max(context, *(-rows for rows in options.rows))
    models = {kind: TimedModel(folder, kind, most, longest) for kind in options.kinds}
    for rows in options.rows:
        for one in measure(models, rows, context, options.rounds):
            facts = {"isa": options.isa or isa.available()[0].name, "context": context}
            print(json.dumps({"benchmark": "cpu_steps", **asdict(one), **facts}))


if __name__ == "__main__":
    main()
