"""Soaks `pagewire up` with a tiny model: load, cancels, kills, grammars, long prompts.

    python -m tests.e2e.soak --minutes 60 [--seed 1] [--kills-per-minute 0]

At its end every completed answer was compared with its twin from a calm server, nothing is left in
the block pools, and resident memory is flat. Exits with 1 otherwise.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.harness.services import commit, hardware
from bench.harness.stack import tiny_chat_model
from tests.e2e.soak.product import running
from tests.e2e.soak.run import Soak, SoakOptions, SoakOutcome, told

UP = (
    # Few blocks: all of their memory has soon been touched, and requests are preempted.
    *("--worker-options=--threads 1", "--max-model-len", "4096", "--num-kv-blocks", "1000"),
    *("--max-num-seqs", "16"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.e2e.soak",
        description="Soaks `pagewire up` with a tiny model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--minutes", type=float, required=True, metavar="N", help="how long the load lasts")
    add("--seed", type=int, default=0, help="of requests, cancels and kills")
    add("--kills-per-minute", type=float, default=2.0, metavar="X", help="0: no service is killed")
    add("--customers", type=int, default=12, metavar="N", help="requests at once")
    options = parser.parse_args(arguments)
    chosen = SoakOptions(
        options.minutes,
        options.seed,
        num_customers=options.customers,
        kills_per_minute=options.kills_per_minute,
    )
    outcome = soak(chosen)
    sys.stdout.write(
        f"{told(outcome)}\n{chosen.minutes:g} minutes, seed {chosen.seed}, commit {commit()}, "
        f"{hardware()}\n"
    )
    return 1 if outcome.problems else 0


def soak(options: SoakOptions) -> SoakOutcome:
    """Runs one soak on a product of its own."""
    with (
        tiny_chat_model() as model,
        tempfile.TemporaryDirectory(prefix="pagewire-soak-") as logs,
        running(model, Path(logs), UP) as product,
    ):
        return Soak(product, options, _tell).run()


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
