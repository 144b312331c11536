"""Sessions that outgrow the KV cache, with and without a tier in host memory, through the split.

    python -m bench.gpu.sessions --shape qwen3-8b --longest 8192 --host-tier-gib 76

Random weights and token ids. Each of `--sessions` asks turn after turn, each time for all that it
asked before and as many new tokens, after a pause; all do so at once. The cache has room for
`--share` of what all sessions hold in their last turns. `ttft` is of the turns after the first, and
`gap` the time between two tokens of a request, with prompts of others computed meanwhile. With a
cache that loses nothing `computed_over_ideal` is 1.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.harness import checkpoints
from bench.harness.deployment import serving
from bench.harness.records import Results, add_json, new_parser
from bench.serving.session import connected
from pagewire.cli.benchmark.load import Ask

BLOCK_SIZE = 16
FIRST_TOKEN = 100


@dataclass(slots=True)
class Times:
    """Seconds that the sessions of a run saw."""

    ttft_s: list[float] = field(default_factory=list)  # of turns after the first
    gaps_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    elapsed_s: float = 0.0

    def facts(self) -> dict[str, float]:
        """The figures that are printed and recorded."""
        return {
            "ttft_p50_ms": round(statistics.median(self.ttft_s) * 1e3, 1),
            "ttft_p99_ms": round(float(np.percentile(self.ttft_s, 99)) * 1e3, 1),
            "gap_p50_ms": round(statistics.median(self.gaps_s) * 1e3, 2),
            "gap_p99_ms": round(float(np.percentile(self.gaps_s, 99)) * 1e3, 2),
            "tokens_per_s": round(self.num_tokens / self.elapsed_s),
            "elapsed_s": round(self.elapsed_s, 1),
        }


async def session(number: int, ask: Ask, options: argparse.Namespace, times: Times) -> None:
    """All turns of one session."""
    drawn, prompt = random.Random(number), list[int]()
    per_turn = options.longest // options.turns
    for turn in range(options.turns):
        await asyncio.sleep(drawn.expovariate(1 / options.pause_s))
        prompt += (FIRST_TOKEN + drawn.randrange(10_000) for _ in range(per_turn))
        last_s = asked_s = time.perf_counter()
        async for arrival in ask(prompt, options.output_len, ""):
            if not arrival.num_tokens:
                continue
            now_s = time.perf_counter()
            if times.num_tokens and last_s > asked_s:
                times.gaps_s.append(now_s - last_s)
            elif turn:
                times.ttft_s.append(now_s - asked_s)
            times.num_tokens += arrival.num_tokens
            last_s = now_s


async def run(scheduler: str, options: argparse.Namespace) -> Times:
    """All sessions at once."""
    times, begun_s = Times(), time.perf_counter()
    async with connected(scheduler, "sessions") as ask:
        every = [session(n, ask, options, times) for n in range(options.sessions)]
        await asyncio.gather(*every)
    times.elapsed_s = time.perf_counter() - begun_s
    return times


def measure(model: Path, options: argparse.Namespace, host_tier_gib: float, out: Results) -> None:
    """One run of the services, and of the sessions."""
    per_session = -(-(options.longest + options.output_len) // BLOCK_SIZE)
    num_blocks = 1 + int(options.sessions * per_session * options.share)
    worker = [
        *("--load-format", "dummy", "--dtype", "bfloat16", "--num-kv-blocks", str(num_blocks)),
        *("--max-model-len", str(options.longest + options.output_len)),
        *("--max-num-seqs", str(options.sessions), "--host-tier-gib", str(host_tier_gib)),
    ]
    with serving(model, worker, options.scheduler) as served:
        facts = asyncio.run(run(served.scheduler, options)).facts()
        ideal = options.sessions * options.longest
        facts["computed_over_ideal"] = round(served.status().num_prefill_tokens / ideal, 2)
    out.say(f"tier of {host_tier_gib:g} GiB, {num_blocks} blocks on the device: {facts}")
    given = {name: value for name, value in vars(options).items() if name != "json"}
    out.add("sessions", {**given, "host_tier_gib": host_tier_gib, **facts})


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    out = Results(options.json, ["python", "-m", "bench.gpu.sessions", *arguments])
    with tempfile.TemporaryDirectory(prefix="pagewire-bench-") as name:
        model = checkpoints.describe(Path(name), options.shape, 0)
        for host_tier_gib in (0.0, options.host_tier_gib):
            measure(model, options, host_tier_gib, out)
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = new_parser("bench.gpu.sessions", __doc__)
    add = parser.add_argument
    add("--shape", choices=checkpoints.NAMES, default="qwen3-8b")
    add("--sessions", type=int, default=64)
    add("--turns", type=int, default=5)
    add("--longest", type=int, default=8192, help="tokens of the last prompt of a session")
    add("--output-len", type=int, default=64)
    add("--pause-s", type=float, default=1.0, help="mean of the time between turns")
    add("--share", type=float, default=0.25, help="of the need that the device's cache holds")
    add("--host-tier-gib", type=float, default=76.0)
    add("--scheduler", type=str.split, default=[], help="options of the scheduler, in one word")
    add_json(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
