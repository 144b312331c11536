"""Families by layers of pagewire on a GPU: steps at real shapes, and the floor of their bytes.

    python -m bench.gpu.families --models qwen3-30b-a3b qwen3-30b-a3b:fp8 --json families.jsonl

Random weights. `step` is the wall time of a decode step with two in flight (`bench.gpu_steps`),
`floor` the time in which this GPU copies the bytes that the step moves at the least
(`bench.harness.floors`), at the rate that it is first seen to copy at. Then a prompt alone and one
that arrives at rows that decode (`bench.arrivals`), and how many kernels were made for all of this
after the worker was ready. Each of several models has a process of its own, and so the whole GPU.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import arrivals, gpu_steps
from bench.arrivals import MixedStep
from bench.harness import checkpoints
from bench.harness.floors import Formats, step_bytes
from bench.harness.records import Results, add_json, new_parser, spread
from bench.harness.tables import pages_for
from worker_svc.config import QUANTIZATIONS, WorkerConfig
from worker_svc.models import config as model_config
from worker_svc.runner.model_runner import ModelRunner
from worker_svc.startup import startup

MODELS = (
    "qwen3-30b-a3b",
    "qwen3-30b-a3b:fp8",
    "gpt-oss-20b-mxfp4",
    "qwen3.5-9b",
    "qwen3.5-35b-a3b:fp8",
    "gemma-3-4b",
)
COPIED_BYTES = 1 << 33  # by one copy, which reads and writes as many


@dataclass(frozen=True, slots=True)
class ShapeInFormat:
    """A shape, and the worker's `--quantization`."""

    shape: str
    quantization: str

    @classmethod
    def parse(cls, text: str) -> "ShapeInFormat":
        """Reads SHAPE or SHAPE:QUANTIZATION. Raises ArgumentTypeError."""
        shape, _, quantization = text.partition(":")
        if shape not in checkpoints.NAMES or (quantization or "auto") not in QUANTIZATIONS:
            raise argparse.ArgumentTypeError(
                f"{text} is no SHAPE or SHAPE:QUANTIZATION of {', '.join(checkpoints.NAMES)}"
            )
        return cls(shape, quantization or "auto")

    def __str__(self) -> str:
        return self.shape if self.quantization == "auto" else f"{self.shape}:{self.quantization}"


def copy_rate() -> float:
    """Bytes per second that this GPU reads and writes when it copies; the median of nine."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    found = []
    for _ in range(10):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        found.append(2 * COPIED_BYTES / (time.perf_counter() - began_s))
    return statistics.median(found[1:])


@contextmanager
def kernels_made() -> Iterator[list[str]]:
    """The names of Triton's kernels that are compiled, or loaded, meanwhile."""
    from triton import knobs  # noqa: PLC0415 - needs Triton

    made: list[str] = []

    def note(*, fn: Any, **_: object) -> bool:
        made.append(str(fn.jit_function.__name__))
        return False

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, note
    try:
        yield made
    finally:
        knobs.runtime.jit_cache_hook = before


def measure(model: ShapeInFormat, given: argparse.Namespace, rate: float, told: Results) -> None:
    """Measures one model."""
    length = given.context + gpu_steps.WARM_STEPS + given.steps + given.prompt + 32
    config = WorkerConfig(
        device="cuda",
        load_format="dummy",
        model_impl="native",
        quantization=model.quantization,
        max_num_seqs=max(*given.batches, given.rows + 2),
        max_model_len=length,
        state_snapshots=1,  # which sequences begin after
    )
    with tempfile.TemporaryDirectory(prefix="pagewire-bench-") as name:
        folder = checkpoints.describe(Path(name), model.shape, given.layers)
        loaded = startup.load(config, folder, "auto", "")
        pages = pages_for(loaded, config, config.max_num_seqs)
        runner = startup.build_runner(config, loaded, pages)
        began_s = time.perf_counter()
        runner.warm_up()
        warm_s = time.perf_counter() - began_s
        spec = model_config.load(folder)
    told.say(f"{model}: {type(runner).__name__}, warm after {warm_s:.1f} s")
    told.say(f"{'rows':>10} {'step ms':>9} {'device ms':>10} {'floor ms':>9} {'share':>6}")
    formats = Formats.of(spec, model.quantization)
    common = {"model": str(model), "context": given.context, "layers": given.layers}
    with kernels_made() as made:
        for rows in given.batches:
            floor_s = step_bytes(spec, rows, given.context, formats).total / rate
            _tell_steps(runner, model, rows, floor_s, given, told, common)
        for shape in (MixedStep(0, given.prompt), MixedStep(given.rows, given.prompt)):
            _tell_arrivals(runner, shape, given, told, common)
    told.say(f"{len(made)} kernels made after start-up: {', '.join(sorted(set(made))) or 'none'}")
    told.add(
        "family_start", {**common, "warm_s": round(warm_s, 2), "made_after": sorted(set(made))}
    )


def _tell_steps(
    runner: ModelRunner,
    model: ShapeInFormat,
    rows: int,
    floor_s: float,
    given: argparse.Namespace,
    told: Results,
    common: dict[str, object],
) -> None:
    argued = ["--shape", model.shape, "--context", str(given.context), "--steps", str(given.steps)]
    options, _, _ = gpu_steps.parse(argued)
    found = [gpu_steps.measure(runner, options, rows) for _ in range(given.repeat)]
    step, device = (
        spread([getattr(one, name) for one in found], 1) for name in ("step_us", "device_us")
    )
    step_ms, device_ms = median_ms(step), median_ms(device)
    share = floor_s * 1e3 / step_ms
    told.say(f"{rows:10} {step_ms:9.2f} {device_ms:10.2f} {floor_s * 1e3:9.2f} {share:6.0%}")
    values = {"rows": rows, "step_us": step, "device_us": device, "floor_s": floor_s}
    told.add("family_steps", {**common, **values})


def _tell_arrivals(
    runner: ModelRunner,
    shape: MixedStep,
    given: argparse.Namespace,
    told: Results,
    common: dict[str, object],
) -> None:
    runs = [arrivals.arrivals(runner, shape, given.context, 9) for _ in range(given.repeat)]
    step, device = (
        spread([statistics.median(getattr(one, name) for one in run) for run in runs], 1)
        for name in ("step_us", "device_us")
    )
    told.say(f"{shape!s:>10} {median_ms(step):9.2f} {median_ms(device):10.2f}")
    told.add(
        "family_arrivals", {**common, "step": str(shape), "step_us": step, "device_us": device}
    )


def median_ms(microseconds: Mapping[str, Any]) -> float:
    """The median of a spread, in milliseconds."""
    return float(microseconds["median"]) / 1e3


def main(arguments: Sequence[str]) -> int:
    """Measures each model; one that fails has no effect on the others."""
    parser = new_parser("bench.gpu.families", __doc__)
    add, default = parser.add_argument, [ShapeInFormat.parse(text) for text in MODELS]
    add("--models", type=ShapeInFormat.parse, nargs="+", default=default, metavar="SHAPE[:FORMAT]")
    add("--batches", type=int, nargs="+", default=[1, 32, 256])
    add("--context", type=int, default=1024)
    add("--rows", type=int, default=32, help="that decode while a prompt arrives")
    add("--prompt", type=int, default=512, help="tokens of the prompt that arrives")
    add("--steps", type=int, default=40)
    add("--repeat", type=int, default=3, help="measurements per median")
    add("--layers", type=int, default=0, help="use only so many layers")
    add_json(parser)
    given = parser.parse_args(arguments)
    if len(given.models) > 1:
        command = [sys.executable, "-m", "bench.gpu.families", *arguments, "--models"]
        # Of options given twice the last one counts.
        codes = [subprocess.run([*command, str(model)]).returncode for model in given.models]
        return max(codes)
    told = Results(given.json, ["python", "-m", "bench.gpu.families", *arguments])
    rate = copy_rate()
    torch.cuda.empty_cache()
    told.say(f"{torch.cuda.get_device_name()} copies {rate / 1e12:.2f} TB/s")
    measure(given.models[0], given, rate, told)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
