"""Prints the number of kernels found by rehearsals, and the steps that need further kernels.

Runs in a process of its own, without computing. Arguments: as JSON, steps of [decoding rows,
prompt, prompt ...], and folders of models; each has a line, and a fork that knows no other's
kernels.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from triton.runtime.cache import triton_key

from kernels import compile_only
from worker_svc.config import WorkerConfig
from worker_svc.models import config
from worker_svc.models.decoder import Decoder
from worker_svc.parallel.group import ALONE
from worker_svc.runner import inputs
from worker_svc.runner.cuda_runner import CudaRunner
from worker_svc.sampling.logits_processors import History, Penalties
from worker_svc.startup import kernel_compiler, startup

H200 = 90
MAX_MODEL_LEN = 4096
META = torch.device("meta")


def main(folder: Path, steps: list[list[int]]) -> None:
    found: list[str] = []
    compile_only.note_launches(H200, lambda one: found.append(one.name))
    shape, _known = config.load(folder), kernel_compiler._know_shapes()
    limits = startup.shape_limits(
        WorkerConfig(device="cuda"), "cuda", MAX_MODEL_LEN, shape.vocab_size
    )
    model = Decoder(shape, torch.bfloat16, META, MAX_MODEL_LEN, ALONE)
    model.pack()
    plan = model.kv_plan(limits.block_size, MAX_MODEL_LEN)
    kernel_compiler._rehearse(model, limits, plan)
    num_rehearsed, surprises = len(found), []
    runner = kernel_compiler._runner(model, limits, plan, kernel_compiler.LARGE_CACHE)
    for step in steps:
        before = len(found)
        run(runner, *step)
        if found[before:]:
            surprises.append([step, found[before:]])
    print(json.dumps([num_rehearsed, surprises]), flush=True)


@torch.inference_mode()
def run(runner: CudaRunner, num_decodes: int, *prompts: int) -> None:
    """Launches a step as the runner does without a graph."""
    step = inputs.build_idle(runner.limits, [1] * num_decodes + list(prompts), META)
    if num_decodes and prompts:
        parts = inputs._split(step.attention, num_decodes)
        step = replace(step, attention=replace(step.attention, parts=parts))
    no_slots = torch.full((num_decodes + len(prompts),), -1, dtype=torch.int32, device=META)
    all_rows = torch.zeros(len(no_slots), dtype=torch.int64, device=META)
    last = inputs.last_tokens(all_rows, all_rows, step.attention) if prompts else None
    part = runner._model.vocab_part(runner._forward(step, last))
    for filters in (False, True):
        runner.slots.sample(part, no_slots, filters)
    penalize(runner, len(no_slots))


def penalize(runner: CudaRunner, num_rows: int) -> None:
    """Penalizes sequences of different lengths."""
    rows, factors = np.arange(num_rows), np.ones(num_rows, dtype=np.float32)
    history = History(runner.slots.token_rows, rows, rows, rows + 1)
    logits = torch.empty((num_rows, runner.limits.vocab_size), device=META)
    runner.slots.penalize(logits, Penalties(rows, factors, factors, factors, history))


if __name__ == "__main__":
    # Forks have what takes seconds: the key of Triton is a hash of all its files, and a difference
    # of tensors without a device loads torch's compiler.
    triton_key()
    _ = torch.empty(1, device=META) - 1
    for folder in sys.argv[2:]:
        if not (child := os.fork()):
            main(Path(folder), json.loads(sys.argv[1]))
            os._exit(0)
        if status := os.waitpid(child, 0)[1]:
            sys.exit(os.waitstatus_to_exitcode(status))
