"""Decode steps with adapters on a GPU, against those of the model alone.

    python -m bench.gpu.adapters --shape qwen3-8b --batch 64 --adapters 32 --rank 16

Random weights, two steps in flight. One adapter for all rows, as many different ones as are asked
for, half of the rows without one, and all rows but one. The adapters are copies of one folder
under different names, each with memory of its own on the device. `ratio` is to the step of the
model alone, by the same worker; `load` is the time until an adapter of the host's memory lies on
the device.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench import gpu_steps
from bench.harness import checkpoints
from bench.harness.records import Results, add_json, new_parser, spread
from bench.harness.tables import pages_for
from wire.adapters import AdapterSource
from worker_svc.adapters.store import AdapterOrder, AdapterStore
from worker_svc.config import WorkerConfig
from worker_svc.models import Decoder
from worker_svc.protocol.step import StepInput
from worker_svc.runner.model_runner import ModelRunner
from worker_svc.startup import startup

CONFIG = '{"peft_type": "LORA", "r": %d, "lora_alpha": %d, "bias": "none"}'


def write_adapter(folder: Path, model: Decoder, rank: int) -> Path:
    """Writes an adapter of all modules that the model's layers are made of."""
    tensors = {}
    for name, target in model.adaptable.targets.items():
        num_outputs, num_inputs = target.whole_shape
        for matrix, shape in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
            values = torch.randn(shape, device=model.device).mul(0.01).bfloat16().cpu()
            tensors[f"base_model.model.{name}.lora_{matrix}.weight"] = values
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(CONFIG % (rank, rank))
    return folder


class Entering:
    """Sequences that enter with adapters."""

    def __init__(self, store: AdapterStore, sources: Sequence[AdapterSource]) -> None:
        self._store = store
        self._sources = sources
        self._num_prepared = 0

    def changed(self, which: Sequence[int | None], step: StepInput) -> StepInput:
        """The step whose sequence i has adapter which[i]; None: the model alone."""
        new = []
        for sequence, index in zip(step.new_sequences, which, strict=True):
            if index is not None:
                self._num_prepared += 1
                self._store.fetch(AdapterOrder(self._num_prepared, self._sources[index]))
                sequence = replace(sequence, adapter_preparation=self._num_prepared)
            new.append(sequence)
        return replace(step, new_sequences=tuple(new))


def cases(batch: int, num_adapters: int) -> dict[str, list[int | None]]:
    """The adapter of each row, by what is measured."""
    different = [row % num_adapters for row in range(batch)]
    return {
        "the model alone": [None] * batch,
        "one adapter for all": [0] * batch,
        f"{num_adapters} different": list(different),
        "half of the rows": [one if row % 2 else None for row, one in enumerate(different)],
        "one row": [0] + [None] * (batch - 1),
    }


def load_ms(store: AdapterStore, source: AdapterSource) -> float:
    """The milliseconds that a copy to the device takes."""
    device, adapter = store.device, store.host.fetch(source).result()
    assert device is not None
    torch.cuda.synchronize()
    started = time.perf_counter()
    device.bring(adapter, ())
    torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3


def measure(
    runner: ModelRunner,
    decoder: Decoder,
    steps: gpu_steps.Options,
    options: argparse.Namespace,
    told: Results,
) -> None:
    """Times each case, the model alone first."""
    store = runner.state.adapters
    assert store is not None
    with tempfile.TemporaryDirectory(prefix="pagewire-bench-") as folder:
        path = str(write_adapter(Path(folder), decoder, options.rank))
        sources = [store.names.load(f"a{n}", path) for n in range(options.adapters)]
    told.say(f"load {load_ms(store, sources[0]):.1f} ms")
    told.say(f"{'rows':22} {'step us':>9} {'device us':>10} {'ratio':>6}")
    entering, alone_us = Entering(store, sources), 0.0
    for name, which in cases(options.batch, options.adapters).items():
        changed = partial(entering.changed, which)
        found = [
            gpu_steps.measure(runner, steps, options.batch, changed) for _ in range(options.repeat)
        ]
        step_us = statistics.median(one.step_us for one in found)
        device_us = statistics.median(one.device_us for one in found)
        alone_us = alone_us or step_us
        told.say(f"{name:22} {step_us:9.0f} {device_us:10.0f} {step_us / alone_us:6.3f}")
        values = {"step_us": spread([one.step_us for one in found], 1), "rows": name}
        told.add("adapters", {**vars(options), **values, "ratio": round(step_us / alone_us, 4)})


def main(arguments: Sequence[str]) -> None:
    parser = new_parser("bench.gpu.adapters", __doc__)
    parser.add_argument("--shape", choices=checkpoints.NAMES, default="qwen3-8b")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeat", type=int, default=3, help="measurements per median")
    add_json(parser)
    options = parser.parse_args(arguments)
    told = Results(options.json, ["python", "-m", "bench.gpu.adapters", *arguments])
    given = ("--context", str(options.context), "--steps", str(options.steps))
    steps, _, _ = gpu_steps.parse(["--shape", options.shape, *given])
    config = WorkerConfig(
        device="cuda",
        load_format="dummy",
        max_num_seqs=options.batch,
        max_model_len=options.context + options.steps + 64,
        max_loras=options.adapters,
        max_lora_rank=options.rank,
    )
    with tempfile.TemporaryDirectory(prefix="pagewire-bench-") as where:
        folder = checkpoints.describe(Path(where), options.shape, 0)
        model = startup.load(config, folder, "bfloat16", "")
    runner = startup.build_runner(config, model, pages_for(model, config, options.batch))
    runner.warm_up()
    (decoder,) = model.natives
    measure(runner, decoder, steps, options, told)


if __name__ == "__main__":
    main(sys.argv[1:])
