"""Accuracy of `pagewire simulate --speculative-config`: drafts foreseen, and drafts served.

    python -m bench.compare.drafts_foreseen [--method ngram suffix] [--streams 1 4]

Products without drafts and with them answer the same prompts in turn, and are recorded. The
recording without drafts is simulated, without and with them; the others say what was accepted.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.compare.speculation import RANDOM, REPEATED, answered, served
from bench.harness.records import Results
from scheduler_svc.core import StepOutputs
from scheduler_svc.journal.calls import perform
from scheduler_svc.journal.events import arguments_of
from scheduler_svc.journal.recording import Recording
from scheduler_svc.speculation.options import parse_speculation
from simulator.capacity.measures import summarize
from simulator.capacity.recorded import read_recorded
from simulator.capacity.speculation import VirtualSpeculation
from simulator.capacity.step_times import fit
from simulator.capacity.virtual_server import VirtualServer

WIRE_S = 0.0002


@dataclass(frozen=True, slots=True)
class Told:
    """What a run told, simulated or served."""

    tokens_per_s: float  # of one request while it decodes, the median of all
    num_verifications: int
    num_drafted: int
    num_accepted: int

    @property
    def acceptance_rate(self) -> float:
        """The share of the drafted tokens that came true."""
        return round(self.num_accepted / max(self.num_drafted, 1), 3)

    @property
    def per_verification(self) -> float:
        """Tokens that a verification brought."""
        return round(1 + self.num_accepted / max(self.num_verifications, 1), 2)


def main(arguments: Sequence[str]) -> int:
    """Writes a line for each workload, number of streams and method."""
    options = _parse(arguments)
    command = ["python", "-m", "bench.compare.drafts_foreseen", *arguments]
    results = Results(options.json, command)
    for workload in options.workloads:
        for num_streams in options.streams:
            _compare(options, results, workload, num_streams)
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare.drafts_foreseen", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--model", type=Path, help="folder or GGUF file (default: the default model)")
    add("--method", nargs="+", default=["ngram"], choices=["ngram", "suffix"])
    add("--workloads", nargs="+", default=[REPEATED, RANDOM], choices=[REPEATED, RANDOM])
    add("--streams", type=int, nargs="+", default=[1], help="requests at a time")
    add("--max-tokens", type=int, default=100, help="of each answer")
    add("--rounds", type=int, default=3, help="of all prompts, which are one recording")
    add("--dtype", default="float32")
    add("--json", default="-", help="file of the results")
    return parser.parse_args(arguments)


def _compare(
    options: argparse.Namespace, results: Results, workload: str, num_streams: int
) -> None:
    configs: dict[str, dict[str, object] | None] = {"off": None}
    configs |= {method: {"method": method} for method in options.method}
    with ExitStack() as stack:
        folders = {name: Path(stack.enter_context(TemporaryDirectory())) for name in configs}
        with ExitStack() as products:
            clients = []
            for name, config in configs.items():
                record = ("--record", str(folders[name]), "--record-prompts", "keep")
                clients.append(products.enter_context(served(options, config, *record)))
            for _ in range(options.rounds):
                for client in clients:  # in turn, so that all see the same machine
                    answered(client, workload, num_streams, options.max_tokens)
        foreseen = {name: _simulated(folders["off"], config) for name, config in configs.items()}
        found = {name: _served(folder) for name, folder in folders.items()}
    for name in options.method:
        results.add(
            "drafts_foreseen",
            {
                "workload": workload,
                "streams": num_streams,
                "method": name,
                **_shown("simulated", foreseen["off"], foreseen[name]),
                **_shown("served", found["off"], found[name]),
            },
        )


def _shown(kind: str, off: Told, on: Told) -> dict[str, object]:
    return {
        f"{kind}_off_tokens_per_s": round(off.tokens_per_s, 1),
        f"{kind}_tokens_per_s": round(on.tokens_per_s, 1),
        f"{kind}_ratio": round(on.tokens_per_s / off.tokens_per_s, 2),
        f"{kind}_acceptance": on.acceptance_rate,
        f"{kind}_per_verification": on.per_verification,
        f"{kind}_verifications": on.num_verifications,
    }


def _simulated(folder: Path, config: dict[str, object] | None) -> Told:
    """What `pagewire simulate --recording` says."""
    workload = read_recorded(folder)
    speculation = None
    if config is not None:
        speculation = VirtualSpeculation(parse_speculation(json.dumps(config)))
    server = VirtualServer(
        workload.config, fit(workload.steps), lookahead=1, wire_s=WIRE_S, speculation=speculation
    )
    summary = summarize(server.serve(workload.arrivals))
    per_s, drafts = 1 / summary.tpot.p50_s, summary.drafts
    if drafts is None:
        return Told(per_s, 0, 0, 0)
    counts = drafts.num_verifications, drafts.num_drafted_tokens, drafts.num_accepted_tokens
    return Told(per_s, *counts)


def _served(folder: Path) -> Told:
    """What happened, as the scheduler recorded it."""
    recording = Recording(folder)
    core, times_s = recording.restore(), dict[tuple[int, int], list[float]]()
    for stored in recording.events():
        answer = perform(core, stored.event.call, arguments_of(stored.event))
        if isinstance(answer, StepOutputs):
            for request in zip(answer.clients.tolist(), answer.handles.tolist(), strict=True):
                times_s.setdefault(request, []).append(core.now_s)
    per_s = [(len(t) - 1) / (t[-1] - t[0]) for t in times_s.values() if len(t) > 1]
    told = core.counters
    counts = told.num_drafts, told.num_drafted_tokens, told.num_accepted_tokens
    return Told(statistics.median(per_s), *counts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
