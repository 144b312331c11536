"""Decode steps of models that transformers computes: in pagewire's graphs, and by `generate()`.

    python -m bench.gpu.transformers_models --shape gpt-oss-20b --rows 1 32

Random weights of a real shape, on one GPU, the same for both. `pagewire` is the wall time of a step
with two in flight, `generate` that of a token of the library's own loop with its own cache. `floor`
is the time in which the GPU reads the weights that a step needs, at the bandwidth given.
"""

import gc
import json
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.harness import checkpoints, configs
from bench.harness.records import Results, add_json, new_parser, spread
from bench.harness.tables import Room, entering
from worker_svc.config import WorkerConfig
from worker_svc.protocol.step import RowSampling, StepInput, StepOutput
from worker_svc.runner.model_runner import ModelRunner
from worker_svc.startup import implementation, startup
from worker_svc.startup.description import facts_of
from worker_svc.startup.startup import LoadedModel
from worker_svc.transformers_models import attention, loading
from worker_svc.transformers_models.config import TransformersConfig
from worker_svc.transformers_models.model import TransformersModel
from worker_svc.tuning.attention import Candidates

_WARM_STEPS = 8


@dataclass(frozen=True, slots=True)
class Measurement:
    """The figures of one model."""

    shape: str
    rows: tuple[int, ...]
    context: int
    steps: int
    repeat: int
    layers: int  # 0: all of the shape
    bandwidth_tb: float


def run(options: Measurement, told: Results) -> None:
    """Measures a shape: the library's own loop first, whose cache is gone before ours is made."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    with tempfile.TemporaryDirectory(prefix="pagewire-bench-") as name:
        folder = _describe(Path(name), options)
        length = options.context + _WARM_STEPS + options.steps + 8
        most = max(options.rows)
        config = WorkerConfig(
            device="cuda",
            dtype="bfloat16",
            load_format="dummy",
            model_impl="transformers",
            max_num_seqs=most,
            max_num_batched_tokens=512,
            max_model_len=length,
            num_kv_blocks=2 + most * -(-length // 16),
        )
        shape = implementation.shape_of(config, folder, device)
        assert isinstance(shape, TransformersConfig)
        made, division = loading.make(loading.LoadTarget(shape, dtype, device))
        weight_bytes = {rows: _bytes_read(made, shape, rows) for rows in options.rows}
        theirs = {rows: _generate_s(made, rows, options) for rows in options.rows}
        gc.collect()
        torch.cuda.empty_cache()
        made.set_attn_implementation(attention.NAME)
        model = TransformersModel(shape, made, dtype, device, division)
        facts = facts_of(shape, folder, "bench", dtype, length)
        loaded = LoadedModel(model, facts, dtype, device, folder, (), Candidates())
        runner = startup.build_runner(config, loaded, config.num_kv_blocks)
        began = time.perf_counter()
        runner.warm_up()
        warm_s = time.perf_counter() - began
        kind, attends = type(runner).__name__, model.attention_backend
        told.say(f"{options.shape}: {kind}, warm after {warm_s:.1f} s, attention by {attends}")
        told.say(f"{'rows':>5}{'pagewire ms':>13}{'generate ms':>13}{'times':>7}{'floor ms':>10}")
        for rows in options.rows:
            ours = [_steps_s(runner, rows, options) for _ in range(options.repeat)]
            floor_s = weight_bytes[rows] / (options.bandwidth_tb * 1e12)
            own, other = statistics.median(ours), statistics.median(theirs[rows])
            told.say(
                f"{rows:5}{own * 1e3:13.2f}{other * 1e3:13.2f}{other / own:7.1f}"
                f"{floor_s * 1e3:10.2f}"
            )
            values = {"step_s": spread(ours, 6), "generate_s": spread(theirs[rows], 6)}
            given = {"shape": options.shape, "rows": rows, "floor_s": floor_s}
            told.add("transformers_steps", {**given, **values})


def _describe(folder: Path, options: Measurement) -> Path:
    config = checkpoints.config_of(options.shape, options.layers) | configs.PLAIN
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _bytes_read(model: torch.nn.Module, shape: TransformersConfig, rows: int) -> float:
    """Bytes of weights that a step reads; of experts those that uniform routing would choose."""
    hf = shape.hf
    total = 0.0
    for name, weight in model.named_parameters():
        share = 1.0
        if ".experts." in name:
            count, chosen = len(weight), hf.num_experts_per_tok
            share = 1 - (1 - chosen / count) ** rows
        elif "embed_tokens" in name and not hf.tie_word_embeddings:
            share = 0.0
        total += weight.numel() * weight.element_size() * share
    return total


@torch.inference_mode()
def _generate_s(model: Any, rows: int, options: Measurement) -> list[float]:
    """Seconds of a token by `generate()`, the prompt's pass taken off."""
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    ids = torch.randint(10, 1000, (rows, options.context), device="cuda")

    def seconds(num_tokens: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens,
            min_new_tokens=num_tokens, do_sample=False, pad_token_id=0,
        )  # fmt: skip
        torch.cuda.synchronize()
        return time.perf_counter() - began

    num_tokens = max(8, options.steps // 4)
    seconds(2)
    found = []
    for _ in range(options.repeat):
        prompt_s = seconds(1)
        found.append((seconds(1 + num_tokens) - prompt_s) / num_tokens)
    return found


def _steps_s(runner: ModelRunner, rows: int, options: Measurement) -> float:
    """Seconds of a decode step, two in flight where the runner launches ahead."""
    _enter(runner, rows, options)
    pending = deque([runner.launch(StepInput(step_id=3, same_rows=True))])
    began = 0.0
    for index in range(_WARM_STEPS + options.steps):
        if index == _WARM_STEPS:
            torch.cuda.synchronize()
            began = time.perf_counter()
        pending.append(runner.launch(StepInput(step_id=4 + index, same_rows=True)))
        _finish(pending)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / options.steps


def _enter(runner: ModelRunner, rows: int, options: Measurement) -> None:
    """Lets the rows enter and computes all but the last of their prompts' tokens, in chunks."""
    length = options.context + _WARM_STEPS + options.steps + 8
    room, sampling = Room(runner.limits.groups, length), RowSampling(temperature=0.0, top_p=1.0)
    new = tuple(
        entering(slot, np.full(options.context, 1 + slot, dtype=np.int32), 0, room, sampling)
        for slot in range(rows)
    )
    slots, budget = np.arange(rows), runner.limits.max_num_batched_tokens
    step = StepInput(step_id=1, reset=True, new_sequences=new, slots=np.zeros(0, dtype=np.int64),
                     num_scheduled=np.zeros(0, dtype=np.int64))  # fmt: skip
    _finish(deque([runner.launch(step)]))
    for slot in range(rows):
        left = options.context - 1
        while left:
            count = min(left, budget)
            chunk = StepInput(step_id=1, slots=np.array([slot]), num_scheduled=np.array([count]))
            _finish(deque([runner.launch(chunk)]))
            left -= count
    decode = StepInput(step_id=2, slots=slots, num_scheduled=np.ones(rows, dtype=np.int64))
    _finish(deque([runner.launch(decode)]))


def _finish(pending: "deque[Any]") -> None:
    launched = pending.popleft()
    output = launched if isinstance(launched, StepOutput) else launched.result()
    if output.error or output.row_status is not None:
        raise RuntimeError(output.error or f"rows of status {output.row_status}")


def main(arguments: Sequence[str]) -> int:
    parser = new_parser("bench.gpu.transformers_models", __doc__)
    parser.add_argument("--shape", choices=checkpoints.NAMES, required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--context", type=int, default=1024, help="tokens of each row")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3, help="measurements per median")
    parser.add_argument("--layers", type=int, default=0, help="use only so many layers")
    parser.add_argument("--bandwidth-tb", type=float, default=3.35, help="TB/s of the GPU")
    add_json(parser)
    values = vars(parser.parse_args(arguments))
    told = Results(
        values.pop("json"), ["python", "-m", "bench.gpu.transformers_models", *arguments]
    )
    run(Measurement(**values | {"rows": tuple(values["rows"])}), told)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
