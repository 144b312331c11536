"""Copies between the KV cache and host memory on a GPU: how fast, and what decode steps pay.

    python -m bench.gpu.host_tier --shape qwen3-8b --json host_tier.jsonl

Random weights of a real shape, no wire. `first use` is the time from an order for a prefix to its
answer, after which a step may read the blocks. Decode steps of `--rows` sequences are timed alone,
and while prefixes are fetched, or stored, one after the other without a pause; `share` is the part
of that time in which copies ran.
"""

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench import gpu_steps
from bench.harness import checkpoints
from bench.harness.records import Results, add_json, new_parser, spread
from bench.harness.tables import pages_for
from worker_svc.config import WorkerConfig
from worker_svc.protocol.transfers import TransferEnd, TransferOrder
from worker_svc.runner.host_tier import HostTier
from worker_svc.runner.model_runner import ModelRunner
from worker_svc.startup import startup

WARM_COPIES = 2
ANSWER_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Prefix:
    """A prefix of `num_blocks` blocks that goes to the tier and comes back, again and again."""

    tier: HostTier
    num_blocks: int
    first_block: int
    num_orders: int = 0

    def copy(self, *, is_fetch: bool) -> TransferEnd:
        """Copies it, and returns the answer. Raises RuntimeError if it is not whole."""
        self.num_orders += 1
        numbers = np.arange(self.num_blocks)
        keys = np.stack([numbers + 1, numbers + 7], axis=1).astype(np.uint64)
        blocks = (self.first_block + numbers).astype(np.int64)
        order = TransferOrder(self.num_orders, is_fetch, blocks, numbers + 1, keys)
        ends: list[TransferEnd] = []
        answered = threading.Event()

        def answer(_: int, end: TransferEnd) -> None:
            ends.append(end)
            answered.set()

        self.tier.submit(order, lambda: False, answer)
        if not answered.wait(ANSWER_TIMEOUT_S) or ends[0].num_blocks < self.num_blocks:
            raise RuntimeError(f"a copy was not whole: {ends}")
        return ends[0]


def first_use(prefix: Prefix, repeat: int, *, is_fetch: bool) -> list[float]:
    """Milliseconds from an order to its answer."""
    found = []
    for _ in range(WARM_COPIES + repeat):
        begun_s = time.perf_counter()
        prefix.copy(is_fetch=is_fetch)
        found.append((time.perf_counter() - begun_s) * 1e3)
    return found[WARM_COPIES:]


def meanwhile(prefix: Prefix, steps: Callable[[], float], *, is_fetch: bool) -> tuple[float, float]:
    """The result of `steps` while copies run, and the share of its time in which they did."""
    is_over = threading.Event()
    copied_s: list[float] = []

    def copy() -> None:
        while not is_over.is_set():
            begun_s = time.perf_counter()
            prefix.copy(is_fetch=is_fetch)
            copied_s.append(time.perf_counter() - begun_s)

    copying = threading.Thread(target=copy)
    begun_s = time.perf_counter()
    copying.start()
    found = steps()
    is_over.set()
    copying.join()
    return found, sum(copied_s) / (time.perf_counter() - begun_s)


def report(prefix: Prefix, runner: ModelRunner, options: argparse.Namespace, out: Results) -> None:
    """Measures and prints all lines."""
    size = prefix.num_blocks * prefix.tier.block_bytes
    for is_fetch, name in ((False, "store"), (True, "fetch")):
        found_ms = first_use(prefix, options.repeat, is_fetch=is_fetch)
        median_ms = statistics.median(found_ms)
        rate = size / median_ms / 1e6
        out.say(f"{name} of {options.tokens} tokens: {median_ms:.2f} ms, {rate:.1f} GB/s")
        values = {"tokens": options.tokens, "bytes": size, "first_use_ms": spread(found_ms, 3)}
        out.add("copy", {"kind": name, **values})
    argued = ["--shape", options.shape, "--context", str(options.context)]
    settings, _, _ = gpu_steps.parse([*argued, "--steps", str(options.steps)])

    def steps() -> float:
        return gpu_steps.measure(runner, settings, options.rows).step_us

    steps()
    for is_fetch, name in ((True, "fetches"), (False, "stores")):
        calm, busy, share = [], [], 0.0
        for _ in range(options.repeat):
            calm.append(steps())
            found, share = meanwhile(prefix, steps, is_fetch=is_fetch)
            busy.append(found)
        calm_us, busy_us = statistics.median(calm), statistics.median(busy)
        out.say(
            f"steps of {options.rows} rows: {calm_us:.0f} us alone, {busy_us:.0f} during {name} "
            f"({busy_us / calm_us - 1:+.1%}, share {share:.0%})"
        )
        each = {"calm_us": spread(calm, 1), "busy_us": spread(busy, 1)}
        facts = {"kind": name, "rows": options.rows, "share": share}
        out.add("steps_during_copies", {**facts, **each})


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    out = Results(options.json, ["python", "-m", "bench.gpu.host_tier", *arguments])
    config = WorkerConfig(
        device="cuda",
        dtype="bfloat16",
        load_format="dummy",
        max_num_seqs=options.rows,
        max_model_len=options.context + options.steps + 256,
        host_tier_gib=options.host_tier_gib,
    )
    with tempfile.TemporaryDirectory(prefix="pagewire-bench-") as name:
        folder = checkpoints.describe(Path(name), options.shape, options.layers)
        model = startup.load(config, folder, "auto", "")
        num_blocks = options.tokens // config.block_size
        rows_end = pages_for(model, config, options.rows)
        begun_s = time.perf_counter()
        runner = startup.build_runner(config, model, rows_end + num_blocks)
        out.say(f"runner with {options.host_tier_gib} GiB: {time.perf_counter() - begun_s:.1f} s")
        runner.warm_up()
        if runner.host_tier is None:
            raise RuntimeError("the tier has no room for a block")
        report(Prefix(runner.host_tier, num_blocks, rows_end), runner, options, out)
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = new_parser("bench.gpu.host_tier", __doc__)
    parser.add_argument("--shape", choices=checkpoints.NAMES, default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=0, help="use only so many layers")
    parser.add_argument("--tokens", type=int, default=2048, help="of the prefix")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=3, help="measurements per median")
    parser.add_argument("--host-tier-gib", type=float, default=4.0)
    add_json(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
