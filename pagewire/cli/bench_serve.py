"""`pagewire bench serve`: loads a running server through its gateway and prints what came."""

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from pagewire._aio import AsyncClient
from pagewire._terminal import Progress, Style
from pagewire._types import Model, Prompt
from pagewire.cli import surroundings
from pagewire.cli.load import Load, Summary, run_load, summarize
from pagewire.cli.options import CommandError, add_command, add_connection, to_connection

if TYPE_CHECKING:
    from pagewire.cli.options import Subparsers


def add_parser(kinds: "Subparsers") -> None:
    """Declares the kind."""
    serve = add_command(kinds, "serve", "Concurrent streams through the gateway, greedy.")
    add = serve.add_argument
    add("--num-requests", type=int, default=64, help="requests in all")
    add("--concurrency", type=int, default=16, help="requests in flight")
    add("--input-len", type=int, default=128, help="tokens of each random prompt")
    add("--output-len", type=int, default=128, help="tokens to generate, past end-of-sequence")
    add("--prompt", metavar="TEXT", help="this text each time (default: random token ids)")
    add("--seed", type=int, default=0, help="of the random prompts")
    add("--num-warmups", type=int, default=2, help="requests before the clock starts")
    add("--model", default="", help="which model, where several are served")
    add("--json", action="store_true", help="one JSON line instead of the table")
    add_connection(serve)
    serve.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the load and prints the table or the JSON line."""
    for name in ("num_requests", "concurrency", "input_len", "output_len"):
        if getattr(options, name) < 1:
            raise ValueError(
                f"--{name.replace('_', '-')}: {getattr(options, name)} is not at least 1"
            )
    model, summary = asyncio.run(_measure(options))
    if options.json:
        sys.stdout.write(json.dumps(_record(options, model, summary)) + "\n")
    else:
        sys.stdout.write(_table(summary, Style(sys.stdout)) + "\n")
    if summary.num_failed:
        raise CommandError(f"{summary.num_failed} requests failed; the first: {summary.failure}")
    return 0


async def _measure(options: argparse.Namespace) -> tuple[Model, Summary]:
    connection = to_connection(options)
    async with AsyncClient(
        connection.target,
        api_key=connection.api_key,
        tls=connection.tls,
        timeout_s=connection.timeout_s,
        allow_insecure_key=connection.allow_insecure_key,
    ) as client:
        model = _pick(await client.wait_until_ready(timeout_s=10.0), options.model)
        load = Load(options.concurrency, options.output_len, options.model)
        generator = random.Random(options.seed)
        warmups = _prompts(options, model, generator, options.num_warmups)
        await run_load(client, warmups, load, lambda: None)
        prompts = _prompts(options, model, generator, options.num_requests)
        with Progress(len(prompts), "bench", sys.stderr) as progress:
            return model, summarize(await run_load(client, prompts, load, progress.advance))


def _pick(models: Sequence[Model], name: str) -> Model:
    for model in models:
        if name in ("", model.name):
            return model
    raise CommandError(f"--model: {name} is not served, only {', '.join(m.name for m in models)}")


def _prompts(
    options: argparse.Namespace, model: Model, generator: random.Random, count: int
) -> list[Prompt]:
    """Random ids differ from the first token on, so that no prefix cache helps."""
    if options.prompt is not None:
        return [options.prompt] * count
    needed = options.input_len + options.output_len
    if needed > model.max_model_len:
        raise CommandError(
            f"--input-len and --output-len: {needed} tokens, {model.name} takes "
            f"{model.max_model_len}"
        )
    return [
        [generator.randrange(model.vocab_size) for _ in range(options.input_len)]
        for _ in range(count)
    ]


def _record(options: argparse.Namespace, model: Model, summary: Summary) -> dict[str, object]:
    names = ("num_requests", "concurrency", "input_len", "output_len", "prompt", "seed", "target")
    return {
        "benchmark": "serve",
        "settings": {name: getattr(options, name) for name in names},
        "model": asdict(model),
        "result": asdict(summary),
        "client": surroundings.describe(),
    }


def _table(summary: Summary, style: Style) -> str:
    counts = f"{summary.num_finished} requests, {summary.num_failed} failed"
    rates = (
        f"{summary.requests_per_s:.2f} requests/s",
        f"{summary.output_tokens_per_s:.1f} output tokens/s",
        f"{summary.total_tokens_per_s:.1f} tokens/s with prompts",
    )
    lines = [
        f"{counts}, in {summary.elapsed_s:.2f} s",
        "   ".join(rates),
        "",
        style.bold(f"{'ms':<8}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}"),
    ]
    for name, spread in (("TTFT", summary.ttft_ms), ("TPOT", summary.tpot_ms)):
        values = (spread.mean, spread.p50, spread.p90, spread.p99)
        lines.append(f"{name:<8}" + "".join(f"{value:>10.2f}" for value in values))
    return "\n".join(lines)
