"""Measures the numbers of docs/performance.md on one GPU, in one run of less than five minutes.

    python -m bench.documented --json documented.jsonl

Families with experts, windows or states are parts that `--only` names: they take minutes more.
Each part is a benchmark of its own, run as the command that is printed; checkpoints are written
once, and kernels are compiled once, by the cold start that is measured first. Parts that fail are
named at the end, without effect on the others.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.gpu import families
from bench.harness import checkpoints
from bench.harness.records import STDOUT, add_json, new_parser
from bench.harness.services import ROOT

PART_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 30.0
SMALL, LARGE = "qwen3-0.6b", "qwen3-8b"
NAMES = ("startup", "split-small", "no-grants", "runner-small", "split-large", "kernels")
FAMILIES = {f"family-{model.replace(':', '-')}": model for model in families.MODELS}


@dataclass(frozen=True, slots=True)
class DocumentedBench:
    """A benchmark of the run."""

    name: str
    module: str
    shape: str | None  # None: it needs no model
    options: tuple[str, ...] = ()


def parts(given: argparse.Namespace, kernels: str) -> tuple[DocumentedBench, ...]:
    """The parts of the page, in order; the cold start must be the first."""
    small, large, repeat = given.small, given.large, ("--repeat", str(given.repeat))
    to_worker = ("--worker", *given.worker) if given.worker else ()
    by_batch = ("--steps", "1", "8", "32", "128", "256", "--prefill", "16")
    one_by_one = ("--steps", "256", "--max-grant", "1", "--runs", "0")
    by_batch_large = ("--steps", "1", "32", "256")
    cold_first = ("--kernels", kernels, "--warm-starts", "1")
    return (
        DocumentedBench("startup", "startup", small, (*cold_first, *to_worker)),
        DocumentedBench("split-small", "throughput", small, (*by_batch, *repeat, *to_worker)),
        DocumentedBench("no-grants", "throughput", small, (*one_by_one, *repeat, *to_worker)),
        DocumentedBench("runner-small", "gpu_steps", small, repeat),
        DocumentedBench("split-large", "throughput", large, (*by_batch_large, *repeat, *to_worker)),
        DocumentedBench("kernels", "kernels", None, ("--only", "decode", "prefill")),
        *(
            DocumentedBench(name, "gpu.families", None, ("--models", model, *repeat))
            for name, model in FAMILIES.items()
        ),
    )


def main(arguments: Sequence[str]) -> int:
    """Runs the parts; returns 1 if one failed."""
    parser = new_parser("bench.documented", __doc__)
    add = parser.add_argument
    all_parts = (*NAMES, *FAMILIES)
    add("--only", choices=all_parts, nargs="+", default=NAMES, help="(default: all but families)")
    add("--repeat", type=int, default=3, help="runs per median (default: 3)")
    add("--small", choices=checkpoints.SHAPES, default=SMALL, help=f"(default: {SMALL})")
    add("--large", choices=checkpoints.SHAPES, default=LARGE, help=f"(default: {LARGE})")
    for size in ("small", "large"):
        add(f"--{size}-model", type=Path, metavar="DIR", help=f"the {size} shape's checkpoint")
    add_json(parser)
    add("--worker", nargs=argparse.REMAINDER, default=[], help="worker options, at the end")
    options = parser.parse_args(arguments)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pagewire-kernels-") as kernels:
        # Triton caches compiled kernels here, for all further processes.
        os.environ["TRITON_CACHE_DIR"] = kernels
        chosen = [part for part in parts(options, kernels) if part.name in options.only]
        given = {options.small: options.small_model, options.large: options.large_model}
        failed = run_all(chosen, options.json, given)
    say(f"{time.monotonic() - started_s:.0f} s in all")
    if failed:
        say(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def run_all(
    chosen: Sequence[DocumentedBench], json_path: str | None, models: Mapping[str, Path | None]
) -> list[str]:
    """Runs parts, those of a shape on one checkpoint; returns the names of those that failed.

    `models` has existing checkpoints by shape; others are written.
    """
    failed = []
    # The parts run in the checkout, so the path must be absolute.
    path = json_path if json_path in (None, STDOUT) else str(Path(json_path).resolve())
    to_file = () if path is None else ("--json", path)
    for shape in dict.fromkeys(part.shape for part in chosen):
        with ExitStack() as on:
            given = _model(shape, models, on)
            for part in (part for part in chosen if part.shape == shape):
                options = None if given is None else (*given, *to_file, *part.options)
                if options is None or not execute(f"bench.{part.module}", options):
                    failed.append(part.name)
    return failed


def _model(
    shape: str | None, models: Mapping[str, Path | None], on: ExitStack
) -> tuple[str, ...] | None:
    """The options for a shape's checkpoint, which exists as long as `on`; None: there is none."""
    if shape is None:
        return ()
    folder = models.get(shape)
    if folder is None:
        folder = on.enter_context(checkpoints.room(shape))
        if not execute("bench.harness.checkpoints", ("--shape", shape, str(folder))):
            return None
    return ("--shape", shape, "--model", str(folder.resolve()))


def execute(module: str, options: Sequence[str]) -> bool:
    """Runs a module and prints its time; False if it failed or took too long."""
    command = ["python", "-m", module, *options]
    say(f"$ {shlex.join(command)}")
    started_s = time.monotonic()
    child = subprocess.Popen([sys.executable, *command[1:]], cwd=ROOT)
    try:
        child.wait(PART_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        say(f"stopped: {PART_TIMEOUT_S:.0f} s are over")
        stop(child)
    say(f"({time.monotonic() - started_s:.1f} s)")
    return child.returncode == 0


def stop(child: "subprocess.Popen[bytes]") -> None:
    """Sends SIGINT, so that the process stops its children."""
    child.send_signal(signal.SIGINT)
    try:
        child.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def say(text: str) -> None:
    """Prints to stderr, since stdout may be for the JSON lines."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
