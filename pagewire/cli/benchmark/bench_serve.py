"""`pagewire bench serve`: puts load on a running server and prints latencies and rates.

It uses gRPC through a gateway, or with `--url` HTTP to any server with OpenAI's API.
"""

import argparse
import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pagewire._aio import AsyncClient
from pagewire._terminal import Progress, Style
from pagewire._types import Prompt
from pagewire.cli.benchmark import surroundings
from pagewire.cli.benchmark.load import (
    Ask,
    LoadSettings,
    Objective,
    RequestFailed,
    Summary,
    ask_gateway,
    run_load,
    summarize,
)
from pagewire.cli.benchmark.openai_http import OpenAIServer
from pagewire.cli.options import CommandError, add_command, add_connection, to_connection

if TYPE_CHECKING:
    from pagewire.cli.options import Subparsers

STDOUT = "-"
CONCURRENCY = 16
HTTP_VOCABULARY = 10_000  # OpenAI's API does not report the vocabulary's size


@dataclass(frozen=True, slots=True)
class ModelUnderLoad:
    """A served model, and the function to query it."""

    name: str
    vocab_size: int
    max_model_len: int | None  # None: not reported
    ask: Ask


def add_parser(kinds: "Subparsers") -> None:
    """Adds the kind."""
    serve = add_command(kinds, "serve", "Measure latencies, rates and goodput of a running server.")
    add = serve.add_argument
    add("--num-requests", type=int, default=64, help="number of requests")
    add(
        "--concurrency",
        type=int,
        help=f"most requests in flight (default: {CONCURRENCY}; no limit with --request-rate)",
    )
    add("--request-rate", type=float, metavar="PER_S", help="mean rate of Poisson arrivals")
    add("--input-len", type=int, default=128, help="tokens per random prompt")
    add("--output-len", type=int, default=128, help="tokens to generate, past end-of-sequence")
    add("--prompt", metavar="TEXT", help="use this prompt (default: random token ids)")
    add("--seed", type=int, default=0, help="seed of random prompts and arrivals")
    add("--num-warmups", type=int, default=2, help="unmeasured requests before")
    add("--model", default="", help="model to use, where several are served")
    for name, what in (("ttft", "first token"), ("tpot", "time per token"), ("e2e", "total time")):
        help_text = f"goodput limit of the {what}"
        add(f"--goodput-{name}-ms", type=float, metavar="MS", help=help_text)
    add("--url", metavar="URL", help="root of an OpenAI API to use instead of gRPC at --target")
    add(
        "--json",
        metavar="PATH",
        nargs="?",
        const=STDOUT,
        help="append one JSON line to this file; - or nothing: print it instead of the table",
    )
    add_connection(serve)
    serve.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the load and prints the table or the JSON line."""
    _check(options)
    model, summary = asyncio.run(_measure(options))
    if options.json is not None:
        _append(options.json, json.dumps(_record(options, model, summary)) + "\n")
    if options.json != STDOUT:
        sys.stdout.write(_table(summary, Style(sys.stdout)) + "\n")
    if summary.num_failed:
        raise CommandError(f"{summary.num_failed} requests failed; the first: {summary.failure}")
    return 0


def _check(options: argparse.Namespace) -> None:
    for name in ("num_requests", "concurrency", "input_len", "output_len"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')}: {value} is not at least 1")
    if options.request_rate is not None and options.request_rate <= 0:
        raise ValueError(f"--request-rate: {options.request_rate} is not above 0")


async def _measure(options: argparse.Namespace) -> tuple[ModelUnderLoad, Summary]:
    async with _server(options) as model:
        concurrency = options.concurrency
        if concurrency is None and options.request_rate is None:
            concurrency = CONCURRENCY
        closed = LoadSettings(
            concurrency or CONCURRENCY, options.output_len, options.model or model.name
        )
        load = LoadSettings(
            concurrency, options.output_len, closed.model, options.request_rate, options.seed
        )
        generator = random.Random(options.seed)
        warmups = _prompts(options, model, generator, options.num_warmups)
        await run_load(model.ask, warmups, closed, lambda: None)
        prompts = _prompts(options, model, generator, options.num_requests)
        with Progress(len(prompts), "bench", sys.stderr) as progress:
            samples = await run_load(model.ask, prompts, load, progress.advance)
        return model, summarize(samples, _objective(options))


@asynccontextmanager
async def _server(options: argparse.Namespace) -> AsyncIterator[ModelUnderLoad]:
    """The model at the target that the options name. Raises CommandError."""
    connection = to_connection(options)
    if options.url is not None:
        server = OpenAIServer(options.url, connection.api_key)
        try:
            listed = await server.models()
        except RequestFailed as error:
            raise CommandError(str(error)) from error
        name = _pick([model["id"] for model in listed], options.model)
        told = next(model for model in listed if model["id"] == name)
        yield ModelUnderLoad(name, HTTP_VOCABULARY, told.get("max_model_len"), server.stream)
        return
    async with AsyncClient(
        connection.target,
        api_key=connection.api_key,
        tls=connection.tls,
        timeout_s=connection.timeout_s,
        allow_insecure_key=connection.allow_insecure_key,
    ) as client:
        models = await client.wait_until_ready(timeout_s=10.0)
        name = _pick([model.name for model in models], options.model)
        found = next(model for model in models if model.name == name)
        yield ModelUnderLoad(name, found.vocab_size, found.max_model_len, ask_gateway(client))


def _pick(names: Sequence[str], name: str) -> str:
    if not names:
        raise CommandError("the server has no model yet")
    if name and name not in names:
        raise CommandError(f"--model: {name} is not served, only {', '.join(names)}")
    return name or names[0]


def _objective(options: argparse.Namespace) -> Objective:
    return Objective(options.goodput_ttft_ms, options.goodput_tpot_ms, options.goodput_e2e_ms)


def _prompts(
    options: argparse.Namespace, model: ModelUnderLoad, generator: random.Random, count: int
) -> list[Prompt]:
    """Random ids that differ from the first token on, so that no prefix is cached."""
    if options.prompt is not None:
        return [options.prompt] * count
    needed = options.input_len + options.output_len
    if model.max_model_len is not None and needed > model.max_model_len:
        raise CommandError(
            f"--input-len and --output-len: {needed} tokens, {model.name} takes "
            f"{model.max_model_len}"
        )
    return [
        [generator.randrange(model.vocab_size) for _ in range(options.input_len)]
        for _ in range(count)
    ]


SETTINGS = (
    *("num_requests", "concurrency", "request_rate", "input_len", "output_len", "prompt", "seed"),
    *("target", "url"),
)


def _record(
    options: argparse.Namespace, model: ModelUnderLoad, summary: Summary
) -> dict[str, object]:
    return {
        "benchmark": "serve",
        "settings": {name: getattr(options, name) for name in SETTINGS},
        "model": {"name": model.name, "max_model_len": model.max_model_len},
        "objective": asdict(_objective(options)),
        "result": asdict(summary),
        "client": surroundings.describe(),
    }


def _append(path: str, line: str) -> None:
    if path == STDOUT:
        sys.stdout.write(line)
        return
    with Path(path).open("a", encoding="utf-8") as lines:
        lines.write(line)


def _table(summary: Summary, style: Style) -> str:
    counts = f"{summary.num_finished} requests, {summary.num_failed} failed"
    rates = (
        f"{summary.requests_per_s:.2f} requests/s",
        f"{summary.goodput_per_s:.2f} good requests/s",
        f"{summary.output_tokens_per_s:.1f} output tokens/s",
        f"{summary.total_tokens_per_s:.1f} tokens/s with prompts",
    )
    lines = [
        f"{counts}, in {summary.elapsed_s:.2f} s",
        "   ".join(rates),
        "",
        style.bold(f"{'ms':<8}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}"),
    ]
    for name, spread in (
        ("TTFT", summary.ttft_ms),
        ("TPOT", summary.tpot_ms),
        ("ITL", summary.itl_ms),
        ("E2E", summary.e2e_ms),
    ):
        values = (spread.mean, spread.p50, spread.p90, spread.p99)
        lines.append(f"{name:<8}" + "".join(f"{value:>10.2f}" for value in values))
    return "\n".join(lines)
