"""Continuous batching, a static batcher on the same worker, and transformers' generate in batches.

    python -m bench.compare.static_batches                    the default model
    python -m bench.compare.static_batches --shape tiny       random weights: seconds

All serve the same requests: prompts of random ids, outputs uniform in 10..200 by a seed, greedy,
none stops early. At most --batch of them run at once.

continuous       all requests are submitted; the scheduler fills a row as soon as it is free
static           the same scheduler and worker get the next batch once the whole batch has ended;
                 as in generate, each of its rows is computed until the longest has ended
static, no idle  the same, but a row that has ended costs nothing: what a static batcher with
                 rows of their own lengths would reach at best
transformers     generate with the prompts padded on the left, one batch after another

Only tokens that a request asked for are counted.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from bench.harness import checkpoints
from bench.harness.client import drive
from bench.harness.deployment import Deployment, serving
from bench.harness.records import Results, add_json
from bench.harness.workloads import WorkloadRequest
from default_model import folder

FIRST_ORDINARY_ID = 17  # after the default model's special tokens
PROMPT_TOKENS = (16, 64)
OUTPUT_TOKENS = (10, 200)
SIDES = ("continuous", "static", "static, no idle", "transformers")
STATIC = "static"
SETTING = ("shape", "model", "requests", "batch", "seed", "dtype", "transformers_dtype", "threads")

Requests = Sequence[WorkloadRequest]


@dataclass(frozen=True, slots=True)
class Rates:
    """One side: medians over its runs."""

    side: str
    seconds: float
    requests_per_s: float
    tokens_per_s: float
    ratio: float  # of its rate to that of the static batcher


def workload(seed: int, num_requests: int, vocab_size: int) -> list[WorkloadRequest]:
    """The requests; the same seed gives every side the same."""
    draw = random.Random(seed).randint
    return [
        WorkloadRequest(
            [draw(FIRST_ORDINARY_ID, vocab_size - 1) for _ in range(draw(*PROMPT_TOKENS))],
            draw(*OUTPUT_TOKENS),
        )
        for _ in range(num_requests)
    ]


def batches(requests: Requests, size: int) -> Iterator[Requests]:
    """The requests in their order, so many at a time."""
    for first in range(0, len(requests), size):
        yield requests[first : first + size]


def padded(batch: Requests) -> Requests:
    """The batch with rows that all last as long as the longest."""
    longest = max(request.max_tokens for request in batch)
    return [replace(request, max_tokens=longest) for request in batch]


class OwnSide:
    """Runs a workload through a scheduler and a worker."""

    def __init__(self, served: Deployment, batch: int) -> None:
        self._served = served
        self._batch = batch
        self._num_runs = 0

    def seconds(self, side: str, requests: Requests) -> float:
        """How long the workload takes with one way of batching."""
        self._served.forget_prefixes()
        if side == "continuous":
            return self._run(requests)
        parts = list(batches(requests, self._batch))
        return sum(self._run(padded(part) if side == STATIC else part) for part in parts)

    def _run(self, requests: Requests) -> float:
        self._num_runs += 1
        tag = f"run-{self._num_runs}"
        return asyncio.run(drive(self._served.scheduler, requests, 0.0, tag)).seconds


class TransformersSide:
    """Runs a workload with generate."""

    def __init__(self, model: Path, batch: int, dtype: str) -> None:
        self._batch = batch
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self._model = loaded.to("cuda" if torch.cuda.is_available() else "cpu")
        # Without an end-of-sequence token, nothing is masked or stopped early.
        self._model.generation_config.eos_token_id = None

    def seconds(self, requests: Requests) -> float:
        """How long the workload takes."""
        began_s = time.perf_counter()
        for part in batches(requests, self._batch):
            self.generate(part)
        return time.perf_counter() - began_s

    def generate(self, batch: Requests) -> list[list[int]]:
        """The outputs of one batch."""
        ids, mask = left_padded([request.prompt for request in batch])
        longest = max(request.max_tokens for request in batch)
        device = self._model.device
        output = self._model.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=longest,
            do_sample=False,
            pad_token_id=0,
        )
        new = output[:, ids.shape[1] :].tolist()  # [B, longest]
        return [row[: one.max_tokens] for row, one in zip(new, batch, strict=True)]


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask, [B, longest] each; a prompt ends where its row does."""
    longest = max(map(len, prompts))
    ids = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)


def rates(seconds: dict[str, list[float]], requests: Requests) -> list[Rates]:
    """The sides that were measured, in their order."""
    num_tokens = sum(request.max_tokens for request in requests)
    static_s = median(seconds[STATIC])
    return [
        Rates(
            side=side,
            seconds=round(median(runs), 2),
            requests_per_s=round(len(requests) / median(runs), 3),
            tokens_per_s=round(num_tokens / median(runs), 1),
            ratio=round(static_s / median(runs), 2),
        )
        for side, runs in seconds.items()
    ]


def table(rows: Sequence[Rates]) -> str:
    """The rows as text; the last column is relative to the static batcher."""
    titles = ("seconds", 9), ("requests/s", 12), ("tokens/s", 10), ("of static", 11)
    lines = [f"{'side':<16}" + "".join(f"{title:>{width}}" for title, width in titles)]
    lines += [
        f"{r.side:<16}{r.seconds:>9.1f}{r.requests_per_s:>12.2f}{r.tokens_per_s:>10.0f}"
        f"{r.ratio:>10.2f}x"
        for r in rows
    ]
    return "\n".join(lines)


def measure(model: Path, options: argparse.Namespace) -> tuple[dict[str, list[float]], Requests]:
    """Seconds of each run of each side; only one side is in memory at a time."""
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    requests = workload(options.seed, options.requests, vocab_size)
    warm_up = workload(options.seed + 1, options.batch, vocab_size)
    seconds: dict[str, list[float]] = {}
    worker_options = ["--dtype", options.dtype, "--max-num-seqs", str(options.batch)]
    worker_options += ["--threads", str(options.threads)]
    limits = ["--max-num-seqs", str(options.batch), "--max-waiting-requests", "0"]
    with serving(model, worker_options, limits) as served:
        own = OwnSide(served, options.batch)
        own.seconds("continuous", warm_up)
        for side in [side for side in options.sides if side != "transformers"]:
            seconds[side] = [own.seconds(side, requests) for _ in range(options.repeat)]
    if "transformers" in options.sides:
        torch.set_num_threads(options.threads)
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        theirs = TransformersSide(model, options.batch, options.transformers_dtype)
        theirs.seconds([replace(request, max_tokens=10) for request in warm_up])
        seconds["transformers"] = [theirs.seconds(requests) for _ in range(options.repeat)]
    return seconds, requests


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare.static_batches", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", type=Path, help="model folder (default: the default model)")
    which.add_argument("--shape", choices=checkpoints.SHAPES, help="random weights of this shape")
    add("--requests", type=int, default=64)
    add("--batch", type=int, default=16, help="most requests at once (default: 16)")
    add("--seed", type=int, default=0)
    add("--repeat", type=int, default=3, help="runs per median (default: 3)")
    add("--dtype", default="auto", help="of the worker (default: the machine's fastest)")
    add("--transformers-dtype", choices=("float32", "bfloat16"), default="float32")
    add("--threads", type=int, default=os.cpu_count() or 1, help="of either side (default: all)")
    add("--sides", nargs="+", choices=SIDES, default=SIDES)
    add_json(parser)
    options = parser.parse_args(arguments)
    options.sides = dict.fromkeys(["continuous", STATIC, *options.sides])
    return options


@contextmanager
def chosen_model(options: argparse.Namespace) -> Iterator[Path]:
    """The model's folder; random weights are deleted after the block."""
    if options.shape:
        with checkpoints.temporary(options.shape) as made:
            yield made
    else:
        yield options.model or folder.ensure()


def main(arguments: Sequence[str]) -> int:
    """Measures all sides, prints the table and a JSON line for each."""
    options = parse(arguments)
    results = Results(options.json, ["python", "-m", "bench.compare.static_batches", *arguments])
    with chosen_model(options) as model:
        seconds, requests = measure(model, options)
    rows = rates(seconds, requests)
    results.say(table(rows))
    setting = {name: str(getattr(options, name)) for name in SETTING}
    for row in rows:
        each = [round(run, 2) for run in seconds[row.side]]
        results.add("static_batches", {**setting, **asdict(row), "seconds_each_run": each})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
