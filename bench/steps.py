"""The time of one decode step by batch, through the split, at a mean context of about 576.

    python -m bench.steps --shape qwen3-0.6b --batches 1 8 32 128 256 --json steps.jsonl

A step is the mean time between the tokens that a client gets while all its requests decode;
`device` is the part in which the worker's device computed, `idle` the fraction in which it did
nothing. Without a wire: `pagewire bench steps --in-runner`, which is `bench.gpu_steps`.
"""

import sys
from collections.abc import Sequence

from bench.harness import split
from bench.harness.records import Results, new_parser

BATCHES = (1, 8, 32, 128, 256)


def main(arguments: Sequence[str]) -> int:
    """Measures one batch size after the other."""
    parser = new_parser("bench.steps", __doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    split.add_options(parser)
    options = parser.parse_args(arguments)
    results = Results(options.json, ["python", "-m", "bench.steps", *arguments])
    with split.started(options, results) as measure:
        for batch in options.batches:
            measure.steps(batch)
        return 0 if measure.is_complete else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
