"""Steps that verify drafts against steps of one token a row, in the runner on a GPU.

    python -m bench.gpu.speculation --shape qwen3-8b --json speculation.jsonl

Random weights of a real shape, greedy, every sequence at about the same context, no wire. For each
number of rows and of drafts a run whose drafts are all wrong comes first, and its tokens are the
drafts of the next run. So the two bound what drafts bring: `wrong` is what they cost where none
comes true, `right` what they gain where all do. Without drafts two steps are in flight; a step
with drafts is awaited before the next, as a scheduler does.
"""

import argparse
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.gpu_steps import side_by_side
from bench.harness import checkpoints
from bench.harness.records import Results, add_json, new_parser, spread
from worker_svc.config import WorkerConfig
from worker_svc.protocol.step import IntColumn, RowSampling, StepInput, StepOutput
from worker_svc.runner.model_runner import ModelRunner
from worker_svc.startup import startup

BLOCK_SIZE = 16
WARM_STEPS = 8


@dataclass(frozen=True, slots=True)
class TimedRun:
    """One run: its pace, and the tokens of each row in order."""

    step_ms: float
    tokens_per_s: float
    accepted: float  # share of the drafts
    tokens: list[list[int]]


class SteadyRows:
    """Sequences side by side that decode, with drafts or without."""

    def __init__(self, runner: ModelRunner, num_rows: int, options: argparse.Namespace) -> None:
        self._runner = runner
        self._num_rows = num_rows
        self._num_tokens = options.tokens
        self._context = options.context
        sampling = RowSampling(temperature=options.temperature)
        self._entering = side_by_side(
            num_rows, options.context, _length(options), runner.limits.groups, sampling
        )

    def plain(self) -> TimedRun:
        """No drafts, two steps in flight."""
        pending = deque([self._runner.launch(self._entering)])
        tokens: list[list[int]] = [[] for _ in range(self._num_rows)]
        began_s = 0.0
        for index in range(self._num_tokens):
            if index == WARM_STEPS:
                while pending:
                    _take(pending, tokens)
                began_s = time.perf_counter()
            pending.append(self._runner.launch(StepInput(step_id=2 + index, same_rows=True)))
            if len(pending) > 1:
                _take(pending, tokens)
        while pending:
            _take(pending, tokens)
        step_s = (time.perf_counter() - began_s) / (self._num_tokens - WARM_STEPS)
        return TimedRun(step_s * 1e3, self._num_rows / step_s, 0.0, tokens)

    def drafting(self, num_drafts: int, guess: Sequence[Sequence[int]] | None) -> TimedRun:
        """Drafts out of the rows' guessed tokens; without a guess, of a token that is unlikely."""
        pending = deque([self._runner.launch(self._entering)])
        tokens: list[list[int]] = [[] for _ in range(self._num_rows)]
        _take(pending, tokens)
        num_steps, num_before, began_s = 0, 0, time.perf_counter()
        while all(len(row) + num_drafts < self._num_tokens for row in tokens):
            if num_steps == WARM_STEPS // (1 if guess is None else num_drafts + 1):
                num_before, began_s = sum(map(len, tokens)), time.perf_counter()
                measured_from = num_steps
            step = self._step(2 + num_steps, num_drafts, tokens, guess)
            pending.append(self._runner.launch(step))
            _take(pending, tokens)
            num_steps += 1
        took_s, num_measured = time.perf_counter() - began_s, num_steps - measured_from
        num_came = sum(map(len, tokens)) - num_before
        num_drafted = num_measured * num_drafts * self._num_rows
        accepted = (num_came - num_measured * self._num_rows) / num_drafted
        return TimedRun(took_s / num_measured * 1e3, num_came / took_s, accepted, tokens)

    def _step(
        self,
        step_id: int,
        num_drafts: int,
        tokens: list[list[int]],
        guess: Sequence[Sequence[int]] | None,
    ) -> StepInput:
        slots = np.arange(self._num_rows)
        drafts = np.zeros((self._num_rows, num_drafts), dtype=np.int64)
        if guess is not None:
            for row, known in enumerate(tokens):
                drafts[row] = guess[row][len(known) : len(known) + num_drafts]
        return StepInput(
            step_id=step_id,
            slots=slots,
            num_scheduled=_each(self._num_rows, 1 + num_drafts),
            num_drafted=_each(self._num_rows, num_drafts),
            draft_token_ids=drafts.reshape(-1),
        )


def _each(num_rows: int, count: int) -> IntColumn:
    return np.full(num_rows, count, dtype=np.int64)


def _take(pending: deque, tokens: list[list[int]]) -> None:  # type: ignore[type-arg]
    """Waits for the oldest step and adds what it brought to the rows' tokens."""
    launched = pending.popleft()
    output = launched if isinstance(launched, StepOutput) else launched.result()
    if output.error:
        raise RuntimeError(output.error)
    ends = np.arange(1, 1 + len(tokens))
    if output.num_sampled is not None:
        ends = np.cumsum(output.num_sampled)
    for row, came in zip(tokens, np.split(output.token_ids, ends[:-1]), strict=True):
        row += came.tolist()


def _length(options: argparse.Namespace) -> int:
    """Most tokens of a sequence."""
    return int(options.context + options.tokens + BLOCK_SIZE)


def main(arguments: Sequence[str]) -> int:
    """Measures every number of rows with every number of drafts."""
    options = _parse(arguments)
    results = Results(options.json, ["python", "-m", "bench.gpu.speculation", *arguments])
    most_rows, length = max(options.batches), _length(options)
    config = WorkerConfig(
        device=options.device,
        max_num_seqs=most_rows * (1 + max(options.drafts)),
        max_model_len=length,
        num_kv_blocks=2 + most_rows * -(-length // BLOCK_SIZE),
    )
    with checkpoints.temporary(options.shape, options.layers) as folder:
        model = startup.load(config, folder, "auto", "")
    runner = startup.build_runner(config, model, config.num_kv_blocks)
    runner.warm_up()
    results.say(
        f"{'rows':>5} {'drafts':>6} {'they are':>8} {'accepted':>8} {'ms a step':>9} "
        f"{'tokens/s':>9} {'to none':>7}"
    )
    for num_rows in options.batches:
        _measure(runner, num_rows, options, results)
    return 0


def _measure(
    runner: ModelRunner, num_rows: int, options: argparse.Namespace, results: Results
) -> None:
    """Without drafts and with every number of them, in turn, `--repeat` times."""
    rows = SteadyRows(runner, num_rows, options)
    found: dict[tuple[int, str], list[TimedRun]] = {}
    for _ in range(options.repeat):
        found.setdefault((0, "none"), []).append(rows.plain())
        for num_drafts in options.drafts:
            wrong = rows.drafting(num_drafts, None)
            found.setdefault((num_drafts, "wrong"), []).append(wrong)
            right = rows.drafting(num_drafts, wrong.tokens)
            found.setdefault((num_drafts, "right"), []).append(right)
    plain_per_s = statistics.median(run.tokens_per_s for run in found[0, "none"])
    for (num_drafts, kind), runs in found.items():
        step_ms = spread([run.step_ms for run in runs], 3)
        rate = spread([run.tokens_per_s for run in runs], 1)
        accepted = spread([run.accepted for run in runs], 3)
        median = statistics.median(run.tokens_per_s for run in runs)
        ratio = round(median / plain_per_s, 3)
        results.say(
            f"{num_rows:5} {num_drafts:6} {kind:>8} {accepted['median']:8.1%} "
            f"{step_ms['median']:9.3f} {rate['median']:9.1f} {ratio:7.3f}"
        )
        given = {"shape": options.shape, "context": options.context, "rows": num_rows}
        given |= {"drafts": num_drafts, "kind": kind, "ratio": ratio}
        results.add(
            "speculation_steps",
            {**given, "step_ms": step_ms, "tokens_per_s": rate, "accepted": accepted},
        )


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = new_parser("bench.gpu.speculation", __doc__)
    add = parser.add_argument
    add("--shape", choices=checkpoints.SHAPES, default="qwen3-0.6b")
    add("--batches", type=int, nargs="+", default=[1, 8, 64], help="rows of a step")
    add("--drafts", type=int, nargs="+", default=[3, 7], help="of each row")
    add("--context", type=int, default=576)
    add("--tokens", type=int, default=128, help="of each row in a run")
    add("--repeat", type=int, default=3, help="measurements per median")
    add("--temperature", type=float, default=0.0)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--layers", type=int, default=0, help="use only so many layers")
    add_json(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
