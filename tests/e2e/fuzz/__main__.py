"""Fuzzes every port of the services, as processes with a tiny model.

    python -m tests.e2e.fuzz --requests 100000 --seed 1 [--targets http,grpc] [--findings DIR]

Cases with a problem are kept in DIR; one that is understood belongs into tests/e2e/fuzz/corpus,
which every run replays first. Exits with 1 when anything was found.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.harness.services import commit, free_ports, hardware, settings
from bench.harness.stack import Stack, started, tiny_chat_model
from pagewire.cli.launcher import services
from scheduler_svc.journal import segments
from tests.e2e.fuzz.case import CORPUS, load
from tests.e2e.fuzz.grpc_target import PUBLIC, TOKENS, GrpcTarget
from tests.e2e.fuzz.http_target import HttpTarget, exchange
from tests.e2e.fuzz.raw_target import RawTarget
from tests.e2e.fuzz.recording_target import RecordingTarget
from tests.e2e.fuzz.report import FuzzReport
from tests.e2e.fuzz.run import FuzzTarget, run_all
from tests.e2e.fuzz.step_target import StepTarget

TARGETS = ("http", "grpc", "tokens", "http1", "http2", "steps", "recordings")
LONE_WORKER = "lone-worker"  # the scheduler of the others does not attach to it
SMALL = ("--threads", "1", "--kv-cache-gib", "0.1", "--max-model-len", "2048")
GATEWAY = ("--store-responses", "16", "--reasoning-parser", "qwen3")
UNUSED_TOKEN, END_OF_THOUGHT = '"<jupyter_text>"', '"</think>"'
BODY = b'{"prompt": "Hello", "max_tokens": 4}'


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    options = _parser().parse_args(arguments)
    unknown = set(options.targets) - set(TARGETS)
    if unknown:
        sys.exit(f"--targets: {', '.join(sorted(unknown))}: known are {', '.join(TARGETS)}")
    began_s = time.monotonic()
    report = asyncio.run(fuzz(options.targets, options.requests, options.seed, options.findings))
    took_s = time.monotonic() - began_s
    sys.stdout.write(
        f"{report}\nseed {options.seed}, {options.requests:,} cases of each target, "
        f"{took_s:.0f} s, commit {commit()}, {hardware()}\n"
    )
    return 0 if report.is_clean else 1


async def fuzz(
    names: Sequence[str], num_cases: int, seed: int, findings: Path | None = None
) -> FuzzReport:
    """Starts the services, replays the corpus and runs the cases."""
    report = FuzzReport(findings)
    with tiny_chat_model() as model, tempfile.TemporaryDirectory() as recordings:
        ports = free_ports()
        _let_think(model)
        records = ("--record", recordings, "--record-max-mib", "16")
        specs = services.plan(settings(ports, SMALL, records, GATEWAY), model)
        lone_port = services.free_ports(1)[0]
        if "steps" in names:
            specs = (*specs, _lone_worker(specs[0], ports.worker, lone_port))
        with started(specs, ports) as stack:
            targets = await _targets(names, stack, Path(recordings), f"127.0.0.1:{lone_port}")
            await run_all(targets, stack, list(load(CORPUS)), num_cases, seed, report)
            report.deaths += stack.take_deaths()
    return report


def _let_think(model: Path) -> None:
    """Gives a tokenizer a token that ends reasoning, so that budgets of it are applied."""
    path = model / "tokenizer.json"
    path.write_text(path.read_text().replace(UNUSED_TOKEN, END_OF_THOUGHT))


def _lone_worker(worker: services.ServiceSpec, port: int, lone_port: int) -> services.ServiceSpec:
    arguments = tuple(str(lone_port) if one == str(port) else one for one in worker.arguments)
    return replace(worker, name=LONE_WORKER, arguments=arguments, address=f"127.0.0.1:{lone_port}")


async def _targets(
    names: Sequence[str], stack: Stack, recordings: Path, lone_worker: str
) -> list[FuzzTarget]:
    http2 = {one: _host_port(stack.address(one)) for one in ("gateway", "scheduler", "worker")}
    made: list[FuzzTarget] = []
    for name in names:
        match name:
            case "http":
                made.append(HttpTarget(stack.http))
            case "grpc":
                made.append(GrpcTarget(name, stack.address("gateway"), PUBLIC))
            case "tokens":
                made.append(GrpcTarget(name, stack.address("scheduler"), TOKENS))
            case "http1":
                made.append(RawTarget(name, {"gateway": stack.http}))
            case "http2":
                made.append(RawTarget(name, http2))
            case "steps":
                made.append(StepTarget(lone_worker))
            case _:
                made.append(RecordingTarget(await _recorded(stack, recordings)))
    return made


async def _recorded(stack: Stack, recordings: Path) -> Path:
    """A recording with some requests in it."""
    head = f"POST /v1/completions HTTP/1.1\r\nhost: f\r\ncontent-length: {len(BODY)}\r\n"
    for _ in range(4):
        await exchange(
            stack.http,
            head.encode() + b"content-type: application/json\r\nconnection: close\r\n\r\n" + BODY,
        )
    await asyncio.sleep(1)  # the recorder writes in the background
    return next(segments.recordings(recordings))


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.e2e.fuzz",
        description="Fuzzes every port of the services, as processes with a tiny model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--requests", type=int, default=1000, metavar="N", help="cases of each target")
    add("--seed", type=int, default=0, help="the same seed draws the same cases")
    add("--targets", type=lambda text: text.split(","), default=TARGETS, help="separated by commas")
    add("--findings", type=Path, metavar="DIR", help="where cases with a problem are kept")
    return parser


if __name__ == "__main__":
    sys.exit(main())
