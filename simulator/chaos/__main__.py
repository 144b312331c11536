"""Runs the production scheduler with simulated clients, failing workers and a lossy network.

    python -m simulator.chaos --seeds 2000
    python -m simulator.chaos --seed 1234          one scenario again, with logs

A seed determines a whole scenario; its time is virtual. At the end every request must have ended
once, with exactly the tokens that it would have had without failures, and every block must be free.
"""

import argparse
import logging
import sys
import time

from simulator.chaos.scenario import draw
from simulator.chaos.story import RunCounts, Wrong, run_seed


def main(arguments: list[str] | None = None) -> int:
    """Runs seeds; returns 1 if one went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=200, help="number of seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run only this seed, with the scheduler's logs")
    options = parser.parse_args(arguments)
    seeds = range(options.first, options.first + options.seeds)
    if options.seed is not None:
        seeds = range(options.seed, options.seed + 1)
        logging.basicConfig(level=logging.INFO, stream=sys.stdout)
        sys.stdout.write(f"{draw(options.seed)}\n")
    total, began_s, num_wrong = RunCounts(), time.perf_counter(), 0
    for seed in seeds:
        try:
            counts = run_seed(seed)
        except Wrong as wrong:
            sys.stdout.write(f"WRONG {wrong}\n")
            num_wrong += 1
            continue
        for name in ("num_requests", "num_refused", "num_tokens", "num_steps", "num_recoveries"):
            setattr(total, name, getattr(total, name) + getattr(counts, name))
        total.virtual_s += counts.virtual_s
        total.ends.update(counts.ends)
    took_s = time.perf_counter() - began_s
    sys.stdout.write(
        f"{len(seeds)} seeds, {num_wrong} wrong, {took_s:.1f} s ({total.virtual_s:.0f} s virtual): "
        f"{total.num_requests} requests, {total.num_refused} refused, {total.num_tokens} tokens, "
        f"{total.num_steps} steps, {total.num_recoveries} recoveries; "
        + ", ".join(f"{count} {reason}" for reason, count in total.ends.most_common())
        + "\n"
    )
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
