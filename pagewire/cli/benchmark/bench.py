"""`pagewire bench KIND`: repeatable measurements.

`serve` measures a running server and needs only this package. The other kinds start the processes
that they measure: they are modules of a checkout, which parse their own options.
"""

import argparse
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pagewire.cli import checkout, options
from pagewire.cli.benchmark import bench_serve

if TYPE_CHECKING:
    from pagewire.cli.options import Subparsers


@dataclass(frozen=True, slots=True)
class Kind:
    """A benchmark in the checkout."""

    name: str
    module: str  # in the package bench
    summary: str
    libraries: tuple[str, ...] = ("torch", "safetensors")


KINDS = (
    Kind("throughput", "throughput", "Tokens per second through scheduler and worker."),
    Kind("steps", "steps", "Time of a decode step by batch; --in-runner: without the wire."),
    Kind(
        "arrivals", "arrivals", "What an arriving prompt costs: steps with prompts, in the runner."
    ),
    Kind("kernels", "kernels", "Every kernel at the shapes that matter.", ("torch", "triton")),
    Kind("startup", "startup", "From starting the processes to the first token."),
    Kind("documented", "documented", "All of docs/performance.md's numbers of one GPU."),
    Kind("plot", "plot", "Draws what documented has measured, and prints its tables.", ()),
)
RUNNER_STEPS = "gpu_steps"


def add_parser(commands: "Subparsers") -> None:
    """Adds the command and its kinds."""
    parser = options.add_command(commands, "bench", "Measure a running server, or parts of one.")
    kinds = parser.add_subparsers(title="kinds", metavar="KIND", required=True)
    bench_serve.add_parser(kinds)
    for kind in KINDS:
        added = checkout.add_command(kinds, kind.name, kind.summary)
        added.set_defaults(run=partial(run, kind), in_runner=False)
        if kind.name == "steps":
            added.add_argument("--in-runner", action="store_true")


def run(kind: Kind, given: argparse.Namespace) -> int:
    """Runs the benchmark's module; returns its exit status."""
    module = RUNNER_STEPS if given.in_runner else kind.module
    return checkout.run_module(
        given, f"bench.{module}", f"bench/{module}.py", "benchmarks", kind.libraries
    )
