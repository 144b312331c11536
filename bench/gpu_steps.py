"""Decode steps of the model runner on a GPU: time by batch, and the device's idle share.

    python -m bench.gpu_steps --shape qwen3-0.6b --json steps.jsonl
    python -m bench.gpu_steps --shape qwen3-8b --tensor-parallel-size 2

Random weights of a real shape, every sequence at about the same context, two steps in flight, no
wire. `step` is wall time; `device` is from the start to the end of the step's graph, by CUDA
events; the difference is the bubble from one replay to the next.
"""

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench.harness import checkpoints
from bench.harness.records import Results, add_json, new_parser, spread
from bench.harness.tables import Room, entering, pages_for
from worker_svc.config import (
    ALL_REDUCES,
    ATTENTION_BACKENDS,
    DTYPES,
    GEMM_ALGORITHMS,
    KV_CACHE_DTYPES,
    MODEL_IMPLS,
    QUANTIZATIONS,
    WorkerConfig,
)
from worker_svc.device.device import resolve_device, set_num_threads
from worker_svc.parallel import group as parallel
from worker_svc.parallel.group import ALONE, Group
from worker_svc.protocol.kv_groups import LayerGroup
from worker_svc.protocol.step import RowSampling, StepInput, StepOutput
from worker_svc.runner.model_runner import ModelRunner
from worker_svc.startup import startup

WARM_STEPS = 20


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a measurement."""

    shape: str
    batches: tuple[int, ...]
    context: int
    steps: int
    temperature: float
    top_p: float
    device: str
    tensor_parallel_size: int
    repeat: int
    layers: int  # 0: all of the shape
    all_reduce: str
    attention_backend: str
    gemm_algorithms: str
    dtype: str
    kv_cache_dtype: str
    quantization: str
    model_impl: str
    model: Path | None


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The rank of this process, and its parameters from rank 0; the default is rank 0."""

    rank: int = 0
    store_port: int = 0
    folder: Path = Path()


@dataclass(frozen=True, slots=True)
class Result:
    """Means over the measured steps of one batch size."""

    batch: int
    step_us: float
    device_us: float
    host_us: float  # of the compute thread, from start to end of a launch
    tokens_per_s: float

    @property
    def bubble_us(self) -> float:
        return self.step_us - self.device_us


FIELDS = ("step_us", "device_us", "bubble_us", "host_us", "tokens_per_s")


def measure(
    runner: ModelRunner,
    options: Options,
    batch: int,
    changed: Callable[[StepInput], StepInput] = lambda step: step,
) -> Result:
    """Times decode steps around the context length; `changed` changes what begins them."""
    num_steps = WARM_STEPS + options.steps
    first = max(1, options.context - num_steps // 2)
    sampling = RowSampling(temperature=options.temperature, top_p=options.top_p)
    length = first + num_steps + 1
    first_step = side_by_side(batch, first, length, runner.limits.groups, sampling)
    pending = deque([runner.launch(changed(first_step))])
    device_us: list[float] = []
    host_s = 0.0
    for index in range(num_steps):
        if index == WARM_STEPS:
            while pending:
                _finish(pending)
            started, host_s = time.perf_counter(), 0.0
            device_us.clear()
        before = time.perf_counter()
        pending.append(runner.launch(StepInput(step_id=2 + index, same_rows=True)))
        host_s += time.perf_counter() - before
        if len(pending) > 1:
            device_us.append(_finish(pending))
    while pending:
        device_us.append(_finish(pending))
    step_s = (time.perf_counter() - started) / options.steps
    return Result(
        batch, step_s * 1e6, float(np.mean(device_us)), host_s / options.steps * 1e6, batch / step_s
    )


def side_by_side(
    batch: int, context: int, length: int, groups: Sequence[LayerGroup], sampling: RowSampling
) -> StepInput:
    """A decode step of `batch` rows with their own blocks for `length` tokens, which begin with it.

    No KV before it is computed: speed does not depend on the cache's content.
    """
    room = Room(groups, length)
    new = tuple(
        entering(slot, np.full(context, 1 + slot, dtype=np.int32), context - 1, room, sampling)
        for slot in range(batch)
    )
    return StepInput(
        step_id=1,
        reset=True,
        new_sequences=new,
        slots=np.arange(batch),
        num_scheduled=np.ones(batch, dtype=np.int64),
    )


def _finish(pending: deque) -> int:  # type: ignore[type-arg]
    launched = pending.popleft()
    output = launched if isinstance(launched, StepOutput) else launched.result()
    if output.error:
        raise RuntimeError(output.error)
    return output.timings.forward_us + output.timings.sample_us


def run(options: Options, place: RankPlace) -> dict[int, list[Result]]:
    """Loads the model and measures every batch, as one rank of a group that all run the same.

    Returns the results of all repetitions, by batch.
    """
    set_num_threads(0, options.tensor_parallel_size)
    largest = max(options.batches)
    length = options.context + WARM_STEPS + options.steps + 32
    config = WorkerConfig(
        device=options.device,
        attention_backend=options.attention_backend,
        gemm_algorithms=options.gemm_algorithms,
        dtype=options.dtype,
        kv_cache_dtype=options.kv_cache_dtype,
        quantization=options.quantization,
        load_format="auto" if options.model is not None else "dummy",
        max_num_seqs=largest,
        max_model_len=length,
        model_impl=options.model_impl,
    )
    with _checkpoint(options, place) as folder, _group(options, place, folder) as group:
        model = group.together(lambda: startup.load(config, folder, "auto", "", group))
        return _measure_all(config, model, options)


def _measure_all(
    config: WorkerConfig, model: startup.LoadedModel, options: Options
) -> dict[int, list[Result]]:
    num_pages = pages_for(model, config, max(options.batches))
    runner = startup.build_runner(config, model, num_pages)
    started = time.perf_counter()
    runner.warm_up()
    print(f"warm after {time.perf_counter() - started:.1f} s", file=sys.stderr)
    return {
        batch: [measure(runner, options, batch) for _ in range(options.repeat)]
        for batch in options.batches
    }


@contextmanager
def _checkpoint(options: Options, place: RankPlace) -> Iterator[Path]:
    """The model's folder: written by rank 0, read by all."""
    if place.rank > 0:
        yield place.folder
        return
    if options.model is not None:
        yield options.model
        return
    with tempfile.TemporaryDirectory(prefix="pagewire-bench-") as folder:
        yield checkpoints.describe(Path(folder), options.shape, options.layers)


@contextmanager
def _group(options: Options, place: RankPlace, folder: Path) -> Iterator[Group]:
    """This rank's group; rank 0 starts the others with its own options, and ends them."""
    size = options.tensor_parallel_size
    if size == 1:
        yield ALONE
        return
    device = parallel.device_of(place.rank, size, resolve_device(options.device))
    if place.rank > 0:
        store = parallel.reach_store(place.store_port, size)
        yield parallel.join(place.rank, size, store, device, options.all_reduce)
        return
    store = parallel.host_store(size)
    command = [sys.executable, "-m", "bench.gpu_steps", *sys.argv[1:]]
    command += ["--store-port", str(store.port), "--folder", str(folder)]
    others = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(1, size)]
    try:
        yield parallel.join(0, size, store, device, options.all_reduce)
    finally:
        for other in others:
            try:
                other.wait(timeout=20)
            except subprocess.TimeoutExpired:
                other.kill()
                other.wait()


def main(arguments: Sequence[str]) -> int:
    options, place, json_path = parse(arguments)
    told = Results(json_path, ["python", "-m", "bench.gpu_steps", *arguments])
    results = run(options, place)
    if place.rank > 0:
        # Communicators would wait for ranks that have ended.
        os._exit(0)
    told.say(
        f"{'batch':>6} {'step us':>9} {'device us':>10} {'bubble us':>10} {'host us':>8} tokens/s"
    )
    given = asdict(options)
    del given["batches"], given["model"]
    for batch, found in results.items():
        values = {name: spread([getattr(one, name) for one in found], 1) for name in FIELDS}
        step, device, bubble, host, rate = (values[name]["median"] for name in FIELDS)
        told.say(f"{batch:6} {step:9.0f} {device:10.0f} {bubble:10.0f} {host:8.0f} {rate:8.0f}")
        told.add("runner_steps", {**given, "batch": batch, **values})
    if options.tensor_parallel_size > 1:
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)
    return 0


def parse(arguments: Sequence[str]) -> tuple[Options, RankPlace, str | None]:
    """The options, the rank, and the file for results."""
    parser = new_parser("bench.gpu_steps", __doc__)
    parser.add_argument("--shape", choices=checkpoints.NAMES, default="qwen3-0.6b")
    parser.add_argument("--model", type=Path, help="a folder with the shape's checkpoint")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    parser.add_argument("--context", type=int, default=576)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=1, help="measurements per median")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--layers", type=int, default=0, help="use only so many layers")
    parser.add_argument("--all-reduce", choices=ALL_REDUCES, default="auto")
    parser.add_argument("--attention-backend", choices=ATTENTION_BACKENDS, default="auto")
    parser.add_argument("--gemm-algorithms", choices=GEMM_ALGORITHMS, default="auto")
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="auto")
    parser.add_argument("--model-impl", choices=MODEL_IMPLS, default="auto")
    for hidden, kind in (("--rank", int), ("--store-port", int), ("--folder", Path)):
        parser.add_argument(hidden, type=kind, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    add_json(parser)
    values = vars(parser.parse_args(arguments))
    json_path = values.pop("json")
    place = RankPlace(**{name: values.pop(name) for name in asdict(RankPlace()) if name in values})
    return Options(**values | {"batches": tuple(values["batches"])}), place, json_path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
