"""Checks that lm-eval gets the same results through the gateway as in its own process.

    python -m tests.e2e.lm_eval.equal --url http://127.0.0.1:8000 --model FOLDER \\
        [--json results.jsonl]

The tasks of `tests/e2e/lm_eval/tasks` run twice: through `local-completions` against a running
gateway (prompts of token ids, `echo`, `logprobs`), and through the harness's `hf` class on the same
weights in float32. Scores must be equal, and the log likelihood of every continuation within 1e-3.
Needs `lm-eval[api]`, `accelerate` and `transformers`; downloads nothing. Run it from the root of
the repository, where the tasks find their data.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

TASKS = ("pagewire_sums", "pagewire_paragraphs")
FOLDER = Path(__file__).with_name("tasks")
TOLERANCE = 1e-3  # on a continuation's log likelihood: a sum of float32 values, each within 1e-4


@dataclass(frozen=True, slots=True)
class Comparison:
    """The results of both sides for one task."""

    task: str
    num_items: int
    scores: Mapping[str, tuple[float, float]]  # metric to (through the gateway, in process)
    largest_difference: float  # of a log likelihood
    same_greedy: bool  # both report the same continuations as greedy

    @property
    def problem(self) -> str | None:
        """Why they are not equal; None when they are."""
        for metric, (ours, theirs) in self.scores.items():
            if not abs(ours - theirs) <= TOLERANCE * max(1.0, abs(theirs)):  # or NaN
                return f"{self.task}: {metric} is {ours} through the gateway, {theirs} in process"
        if not self.largest_difference <= TOLERANCE:
            return f"{self.task}: a log likelihood differs by {self.largest_difference:.2e}"
        return None if self.same_greedy else f"{self.task}: not the same continuations are greedy"


def gateway_arguments(url: str, name: str, model: Path) -> dict[str, Any]:
    """Arguments of the harness's `local-completions`."""
    return {
        "model": name,
        "base_url": f"{url}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": str(model),
        "num_concurrent": 8,
        "max_retries": 1,
    }


def hf_arguments(model: Path) -> dict[str, Any]:
    """Arguments of the harness's `hf`."""
    return {"pretrained": str(model), "dtype": "float32", "device": "cpu"}


def evaluate(kind: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """The harness's results, with the log likelihoods of every sample."""
    import lm_eval  # noqa: PLC0415 - it is heavy, and in no extra of ours
    from lm_eval.tasks import TaskManager  # noqa: PLC0415

    results: Mapping[str, Any] = lm_eval.simple_evaluate(
        model=kind,
        model_args=dict(arguments),
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(FOLDER), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    return results


def compare(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[Comparison]:
    """One comparison per task."""
    for task in TASKS:
        pairs = list(zip(_answers(ours, task), _answers(theirs, task), strict=True))
        found, expected = ours["results"][task], theirs["results"][task]
        metrics = [name for name, value in expected.items() if isinstance(value, float)]
        yield Comparison(
            task=task,
            num_items=len(pairs),
            scores={name: (found[name], expected[name]) for name in metrics},
            largest_difference=float(np.max([abs(one[0] - other[0]) for one, other in pairs])),
            same_greedy=all(one[1:] == other[1:] for one, other in pairs),
        )


def _answers(results: Mapping[str, Any], task: str) -> list[tuple[float, ...]]:
    """Log likelihoods, and whether the continuation is greedy where the task asks for it."""
    answers = []
    for sample in sorted(results["samples"][task], key=lambda sample: sample["doc_id"]):
        for answer in sample["filtered_resps"]:
            values = answer if isinstance(answer, Sequence) else (answer,)
            answers.append((float(values[0]), *(bool(value) for value in values[1:])))
    return answers


def run(url: str, name: str, model: Path) -> list[Comparison]:
    """Runs both sides and compares them."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    ours = evaluate("local-completions", gateway_arguments(url, name, model))
    return list(compare(ours, evaluate("hf", hf_arguments(model))))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a line per metric; exits with 1 where the sides differ."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.lm_eval.equal")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="URL of a running gateway")
    parser.add_argument("--model", type=Path, required=True, help="the served model's folder")
    parser.add_argument("--served-name", help="name of the model; else that of its folder")
    parser.add_argument("--json", type=Path, help="append the results to this file")
    options = parser.parse_args(arguments)
    found = run(options.url, options.served_name or options.model.name, options.model)
    for one in found:
        for metric, (ours, theirs) in one.scores.items():
            print(f"{one.task} {metric}: {ours:.4f} through the gateway, {theirs:.4f} in process")
        print(f"{one.task}: {one.num_items} log likelihoods within {one.largest_difference:.1e}")
    if options.json is not None:
        with options.json.open("a") as file:
            file.writelines(json.dumps(asdict(one)) + "\n" for one in found)
    problems = [one.problem for one in found if one.problem is not None]
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
