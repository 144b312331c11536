"""Scheduler and worker as processes, driven over gRPC: tokens in, tokens out, whole run timed.

    python -m bench.throughput --shape qwen3-0.6b --steps 1 8 32 128 256 --json throughput.jsonl

The workload is the one other small engines publish: 256 requests, prompts and outputs uniform in
100..1024 from Python's generator with seed 0, all submitted at once, 133,966 output tokens.
`--steps` adds the time of one decode step by batch, as the client sees it, at a mean context of
about 576; `--prefill` adds that many prompts of 4,096 tokens with one output token each. `--static`
compares requests that enter as others end with batches that end together, of the worker's slots:

    python -m bench.throughput --shape tiny --runs 0 --static 64 --worker --max-num-seqs 16
"""

import sys
from collections.abc import Sequence

from bench.harness import split
from bench.harness.records import Results, new_parser


def main(arguments: Sequence[str]) -> int:
    """Measures steps, then prefills, then workloads, then batches that end together."""
    parser = new_parser("bench.throughput", __doc__)
    add = parser.add_argument
    add("--num-requests", type=int, default=256)
    add("--runs", type=int, default=1, help="workloads to time, seeds 0, 2, 4, ... (default: 1)")
    add("--steps", type=int, nargs="*", default=[], help="batch sizes to time a step of")
    add("--prefill", type=int, nargs="*", default=[], help="numbers of long prompts to time")
    add("--static", type=int, default=0, help="requests to time in batches that end together, too")
    split.add_options(parser)
    options = parser.parse_args(arguments)
    results = Results(options.json, ["python", "-m", "bench.throughput", *arguments])
    with split.started(options, results) as measure:
        for batch in options.steps:
            measure.steps(batch)
        for num_prompts in options.prefill:
            measure.prefill(num_prompts)
        for index in range(options.runs):
            measure.workload(2 * index, options.num_requests)
        if options.static:
            measure.static(options.static)
        return 0 if measure.is_complete else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
