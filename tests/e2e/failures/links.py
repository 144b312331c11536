"""Harms the links between live services while clients wait for texts, and compares every text.

    python -m tests.e2e.failures.links [--requests 64] [--tokens 256] [--model DIR]

A relay lies between gateway and scheduler, and one between scheduler and worker. On each of these
links in turn, while all processes live, connections are reset every 0.4 s for 10 s, cut in the
middle of a frame as often, and stand still for 12 s. Requests begin before and meanwhile. Each text
is compared with that of the same request undisturbed; the exit status is 1 if one was lost or
differs.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx

from bench.harness.services import ROOT, START_TIMEOUT_S, commit, free_ports, hardware, settings
from pagewire.cli.launcher import services
from pagewire.cli.launcher.processes import Services
from tests.byte_relay import ByteRelay
from tests.e2e.failures.kill_matrix import model_folder

EVERY_S, LASTS_S, STALL_S = 0.4, 10.0, 12.0
LINKS, KINDS = ("gateway-scheduler", "scheduler-worker"), ("reset", "cut", "stall")
LATE = 0.25  # of the requests begin while the link is harmed


def ask(url: str, number: int, num_tokens: int) -> str:
    """The text of a request, or what became of it instead."""
    body = {
        "prompt": f"Once upon a time, {number}",
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "seed": number,
        "temperature": 1.0,
    }
    try:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300.0)
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"
    if answer.is_error:
        return f"{answer.status_code}: {answer.text}"
    return str(answer.json()["choices"][0]["text"])


async def harm(relay: ByteRelay, kind: str) -> None:
    """Does one thing to a link."""
    if kind == "stall":
        relay.stall()
        await asyncio.sleep(STALL_S)
        relay.go_on()
        return
    for _ in range(round(LASTS_S / EVERY_S)):
        await asyncio.sleep(EVERY_S)
        if kind == "reset":
            relay.reset()
        else:
            relay.cut()


async def measure(url: str, relays: dict[str, ByteRelay], options: argparse.Namespace) -> int:
    """Harms each link in each way; returns how many texts were lost or differ."""
    loop, num_bad = asyncio.get_running_loop(), 0
    with ThreadPoolExecutor(options.requests) as pool:

        def begin(numbers: range) -> list[asyncio.Future[str]]:
            return [loop.run_in_executor(pool, ask, url, n, options.tokens) for n in numbers]

        num_early = round(options.requests * (1 - LATE))
        calm = await asyncio.gather(*begin(range(options.requests)))
        for name in options.links.split(","):
            relay = relays[name]
            for kind in options.kinds.split(","):
                before = relay.num_resets
                running = begin(range(num_early))
                await asyncio.sleep(EVERY_S)
                harming = asyncio.create_task(harm(relay, kind))
                await asyncio.sleep(LASTS_S / 4)
                running += begin(range(num_early, options.requests))
                await harming
                texts = await asyncio.gather(*running)
                wrong = [text for text, whole in zip(texts, calm, strict=True) if text != whole]
                num_bad += len(wrong)
                print(
                    f"{name}, {kind}: {len(texts) - len(wrong)} of {len(texts)} equal, "
                    f"{relay.num_resets - before} connections reset",
                    flush=True,
                )
                for text in wrong[:3]:
                    print(f"  {text[:300]!r}")
    return num_bad


async def run(model: Path, options: argparse.Namespace) -> int:
    """Starts the services with their relays; returns how many texts were lost or differ."""
    ports = free_ports()
    async with ByteRelay(ports.scheduler) as above, ByteRelay(ports.worker) as below:
        plain = replace(settings(ports), dtype="float32")
        planned = (
            services.plan(plain, model)[0],
            services.plan(replace(plain, worker_port=below.port), model)[1],
            services.plan(replace(plain, scheduler_port=above.port), model)[2],
        )
        url = f"http://127.0.0.1:{ports.gateway_http}"

        def is_ready() -> bool:
            with suppress(httpx.TransportError):
                return httpx.get(f"{url}/ready", timeout=5.0).is_success
            return False

        with tempfile.TemporaryDirectory() as logs, Services(ROOT, Path(logs)) as running:
            running.start(planned)
            await asyncio.to_thread(running.wait_until, "gateway", is_ready, START_TIMEOUT_S)
            return await measure(url, dict(zip(LINKS, (above, below), strict=True)), options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line per link and kind of harm; returns 1 if a text was lost or differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.failures.links", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="tokens per output")
    parser.add_argument("--model", type=Path, help="model folder (default: a tiny random one)")
    parser.add_argument("--links", default=",".join(LINKS), help="only these")
    parser.add_argument("--kinds", default=",".join(KINDS), help="only these ways to harm them")
    options = parser.parse_args(arguments)
    print(f"commit {commit()}, {hardware()}, {' '.join(sys.argv[1:])}", flush=True)
    with model_folder(options.model) as model:
        num_bad = asyncio.run(run(model, options))
    print(f"{num_bad} lost or different")
    return int(num_bad > 0)


if __name__ == "__main__":
    sys.exit(main())
