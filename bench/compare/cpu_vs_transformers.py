"""CPU: tokens per second through the three services, compared with transformers' generate.

    python -m bench.compare.cpu_vs_transformers                       starts the services itself
    python -m bench.compare.cpu_vs_transformers --target HOST:PORT    a running gateway

With --isa (avx512, avx2) both sides are held to that instruction set: pagewire by PAGEWIRE_CPU_ISA,
transformers by the variables of torch, oneDNN and MKL, in a process of its own, since they are read
when torch is loaded.

Both sides get the same prompts of random ids, use all cores, choose greedily and never stop early.
pagewire serves the default model as `pagewire up` does, from its GGUF file, and multiplies the
integers; transformers gets the same weights as a folder of float numbers. --model is a folder that
both get. transformers computes in float32, pagewire in the machine's fastest type unless --dtype is
given. Every run has its own prompts, so no prefix is cached. transformers answers one request
at a time; pagewire is asked for one stream and then for many at once. Only one side
runs at a time. Prints a table, then a JSON line for each of its rows.
"""

import argparse
import asyncio
import concurrent.futures
import contextlib
import functools
import importlib.metadata
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from bench.harness import services
from default_model import folder
from pagewire.v1 import inference_pb2, inference_pb2_grpc, types_pb2

FIRST_ORDINARY_ID = 17  # after the default model's special tokens
RUN_TIMEOUT_S = 600.0
# What holds torch and its libraries to an instruction set.
HOLDS = {
    "avx512": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
}
LIBRARIES = ("torch", "transformers", "tokenizers", "grpcio", "protobuf", "numpy")

Prompt = list[int]


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """Times of one request, at its client."""

    token_ids: tuple[int, ...]
    first_token_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class ConcurrentRun:
    """Requests that ran at the same time."""

    streams: tuple[StreamTimes, ...]
    wall_s: float

    @property
    def tokens_per_s(self) -> float:
        return sum(len(s.token_ids) for s in self.streams) / self.wall_s


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: medians over the runs."""

    side: str
    num_streams: int
    tokens_per_s: float
    tokens_per_s_each_run: tuple[float, ...]
    first_token_ms: float
    ms_per_token: float


def prompts(seed: int, count: int, length: int, vocab_size: int) -> list[Prompt]:
    """Random prompts; the same seed gives both sides the same."""
    random = np.random.default_rng(seed)
    ids = random.integers(FIRST_ORDINARY_ID, vocab_size, size=(count, length))
    return [list(map(int, row)) for row in ids]


def row(side: str, runs: Sequence[ConcurrentRun]) -> Row:
    """The medians of several runs of one setting."""
    streams = [stream for run in runs for stream in run.streams]
    later_s = [(s.total_s - s.first_token_s) / (len(s.token_ids) - 1) for s in streams]
    return Row(
        side=side,
        num_streams=len(runs[0].streams),
        tokens_per_s=round(statistics.median(run.tokens_per_s for run in runs), 2),
        tokens_per_s_each_run=tuple(round(run.tokens_per_s, 2) for run in runs),
        first_token_ms=round(1e3 * statistics.median(s.first_token_s for s in streams), 1),
        ms_per_token=round(1e3 * statistics.median(later_s), 2),
    )


def table(rows: Sequence[Row]) -> str:
    """The rows as text; the last column is relative to the first row."""
    titles = ("streams", 8), ("tokens/s", 10), ("first token", 13), ("per token", 11), ("ratio", 7)
    lines = [f"{'side':<14}" + "".join(f"{title:>{width}}" for title, width in titles)]
    for r in rows:
        lines.append(
            f"{r.side:<14}{r.num_streams:>8}{r.tokens_per_s:>10.1f}{r.first_token_ms:>10.0f} ms"
            f"{r.ms_per_token:>8.1f} ms{r.tokens_per_s / rows[0].tokens_per_s:>7.2f}"
        )
    return "\n".join(lines)


class TokenTimes(BaseStreamer):
    """Records when generate hands over each token; the first call has the prompt."""

    def __init__(self) -> None:
        self.at_s: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.at_s.append(time.perf_counter())

    def end(self) -> None:
        """Called by generate at the end; does nothing."""


def measure_transformers(
    model_folder: Path, runs: Sequence[Prompt], num_tokens: int
) -> list[ConcurrentRun]:
    """Generates for one prompt after another; the first is warm-up and left out."""
    torch.set_num_threads(os.cpu_count() or 1)
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    # Without an end-of-sequence token, nothing is masked or stopped early.
    model.generation_config.eos_token_id = None
    measured = []
    for prompt in runs:
        times = TokenTimes()
        inputs = torch.tensor([prompt])  # [1, T]
        began_s = time.perf_counter()
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=num_tokens,
            do_sample=False,
            streamer=times,
        )
        total_s = time.perf_counter() - began_s
        token_ids = tuple(output[0, len(prompt) :].tolist())
        stream = StreamTimes(token_ids, times.at_s[1] - began_s, total_s)
        measured.append(ConcurrentRun((stream,), total_s))
    return measured[1:]


def measure_held_transformers(
    model_folder: Path, runs: Sequence[Prompt], num_tokens: int, isa: str
) -> list[ConcurrentRun]:
    """`measure_transformers` in a process whose libraries keep to an instruction set."""
    context = multiprocessing.get_context("spawn")
    before = {name: os.environ.get(name) for name in HOLDS[isa]}
    os.environ.update(HOLDS[isa])
    try:
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            return pool.submit(measure_transformers, model_folder, runs, num_tokens).result()
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


async def measure_pagewire(
    address: str, runs: Sequence[Sequence[Prompt]], num_tokens: int
) -> list[ConcurrentRun]:
    """Streams all prompts of a run at once; the first run is warm-up and left out."""
    measured = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for batch in runs:
            began_s = time.perf_counter()
            async with asyncio.timeout(RUN_TIMEOUT_S):
                streams = await asyncio.gather(*(_stream(stub, p, num_tokens) for p in batch))
            measured.append(ConcurrentRun(tuple(streams), time.perf_counter() - began_s))
    return measured[1:]


async def _stream(
    stub: "inference_pb2_grpc.InferenceServiceAsyncStub", prompt: Prompt, num_tokens: int
) -> StreamTimes:
    sampling = types_pb2.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    request = inference_pb2.GenerateStreamRequest(
        prompt=inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=prompt)),
        options=inference_pb2.GenerationOptions(sampling=sampling),
    )
    began_s = time.perf_counter()
    first_token_s: float | None = None
    token_ids: list[int] = []
    async for answer in stub.GenerateStream(request):
        token_ids += answer.delta.token_ids
        if first_token_s is None and token_ids:
            first_token_s = time.perf_counter() - began_s
    if first_token_s is None or len(token_ids) != num_tokens:
        raise services.ProductFailed(f"asked for {num_tokens} tokens, got {len(token_ids)}")
    return StreamTimes(tuple(token_ids), first_token_s, time.perf_counter() - began_s)


def same_outputs(one: Sequence[ConcurrentRun], other: Sequence[ConcurrentRun]) -> str:
    """The number of requests with the same tokens from both sides, as text."""
    pairs = [
        (a.token_ids, b.token_ids)
        for x, y in zip(one, other, strict=True)
        for a, b in zip(x.streams, y.streams, strict=True)
    ]
    same = sum(a == b for a, b in pairs)
    return f"{same} of {len(pairs)} outputs are the same tokens on both sides"


def environment(load_before: float) -> dict[str, object]:
    """The environment of the run; a load above zero means that other processes were running."""
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    return {
        "hardware": services.hardware(),
        "load_before": round(load_before, 2),
        "versions": {"python": platform.python_version(), **versions},
        "commit": services.commit(),
        "command": " ".join(["python -m bench.compare.cpu_vs_transformers", *sys.argv[1:]]),
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare.cpu_vs_transformers",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", type=Path, help="model folder (default: the default model)")
    parser.add_argument("--side", choices=["both", "transformers", "pagewire"], default="both")
    parser.add_argument("--target", metavar="HOST:PORT", help="gRPC of a running gateway")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16], help="streams at once")
    add = parser.add_argument
    add("--dtype", default="auto", help="of pagewire; transformers always computes in float32")
    parser.add_argument("--isa", choices=HOLDS, help="hold both sides to this instruction set")
    parser.add_argument("--repeats", type=int, default=3, help="runs per median")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=128)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures what the options select and prints it."""
    options = parse(arguments)
    load_before = os.getloadavg()[0]
    model_folder = options.model or folder.ensure()
    vocab_size = json.loads((model_folder / "config.json").read_text())["vocab_size"]
    # One more run than repeats: the warm-up.
    batches = {
        count: [
            prompts(1000 * count + run, count, options.prompt_tokens, vocab_size)
            for run in range(options.repeats + 1)
        ]
        for count in sorted({1, *options.streams})
    }
    results: dict[tuple[str, int], list[ConcurrentRun]] = {}
    if options.side != "pagewire":
        alone = [batch[0] for batch in batches[1]]
        measure = measure_transformers
        if options.isa:
            measure = functools.partial(measure_held_transformers, isa=options.isa)
        results["transformers", 1] = measure(model_folder, alone, options.output_tokens)
    if options.side != "transformers":
        worker_options = ["--device", "cpu", "--dtype", options.dtype]
        if options.isa:
            os.environ["PAGEWIRE_CPU_ISA"] = options.isa
            print(f"transformers is held by {HOLDS[options.isa]}, pagewire by PAGEWIRE_CPU_ISA")
        served = (
            contextlib.nullcontext(options.target)
            if options.target
            else services.running(options.model or folder.ensure_file(), worker_options)
        )
        with served as address:
            for count in options.streams:
                results["pagewire", count] = asyncio.run(
                    measure_pagewire(address, batches[count], options.output_tokens)
                )
    report(results, load_before, is_exact=options.dtype == "float32")


def report(
    results: dict[tuple[str, int], list[ConcurrentRun]], load_before: float, *, is_exact: bool
) -> None:
    """Prints the table and the JSON lines."""
    rows = [row(side, runs) for (side, _), runs in results.items()]
    print(table(rows))
    if is_exact and ("transformers", 1) in results and ("pagewire", 1) in results:
        print(same_outputs(results["transformers", 1], results["pagewire", 1]))
    shared = environment(load_before)
    for one in rows:
        print(json.dumps({"benchmark": "cpu_vs_transformers", **asdict(one), **shared}))


if __name__ == "__main__":
    main()
