"""The runner of CUDA on the CPU: in place of replaying a graph it launches what is captured in it.

Its limits are small, since every program of a kernel is interpreted.
"""

import dataclasses
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from worker_svc.adapters.reading import AdapterReader
from worker_svc.adapters.store import AdapterLimits, AdapterStore
from worker_svc.attention.kv_cache import KVCache
from worker_svc.models import Decoder, compiled, linear, load_model
from worker_svc.models.stored import quantized
from worker_svc.protocol.step import Limits
from worker_svc.runner.eager_runner import EagerRunner
from worker_svc.runner.model_runner import ModelRunner

CPU = torch.device("cpu")
BLOCK_SIZE, BLOCKS_PER_SEQ = 8, 10
NUM_SNAPSHOTS = 2  # of states
MOST_SPLITS = 4  # of a row's context
LIMITS = Limits(
    num_blocks=1 + 6 * BLOCKS_PER_SEQ,
    block_size=BLOCK_SIZE,
    max_num_seqs=6,
    max_num_batched_tokens=96,
    max_model_len=BLOCK_SIZE * BLOCKS_PER_SEQ,
    vocab_size=128,
)
needs_interpreter = [
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1" or torch.cuda.is_available(),
        reason="Triton does not interpret here",
    ),
    # Rows of padding hold what memory held before.
    pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning"),
]


def cache(model: Decoder) -> KVCache:
    return model.new_cache(LIMITS.num_blocks, BLOCK_SIZE)


def eager_runner(llama_folder: Path) -> ModelRunner:
    """The runner of the CPU, with the same limits."""
    model = load_model(llama_folder, torch.float32, CPU, LIMITS.max_model_len)
    model.make_states(LIMITS.max_num_seqs, NUM_SNAPSHOTS)
    return EagerRunner(model, cache(model), LIMITS, CPU)


def interpreted_runner(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch, adapters: AdapterLimits | None = None
) -> ModelRunner:
    """Fused layers on the CPU, and no graph around what graphs launch."""
    return without_graphs(to_have_kernels(llama_folder, monkeypatch), monkeypatch, adapters)


def composed_runner(
    folder: Path, monkeypatch: pytest.MonkeyPatch, adapters: AdapterLimits | None = None
) -> ModelRunner:
    """The runner with layers by torch between kernels."""
    use_few_splits(monkeypatch)
    model = to_have_kernels(folder, monkeypatch)
    model.composed = model._compose()
    model.make_states(LIMITS.max_num_seqs, NUM_SNAPSHOTS)
    return launching(_runner_of(model, adapters), monkeypatch)


def _runner_of(model: Decoder, limits: AdapterLimits | None) -> ModelRunner:
    """The runner of CUDA, with places for adapters."""
    from worker_svc.runner.cuda_runner import CudaRunner  # noqa: PLC0415 - Triton must interpret

    device = None if limits is None else model.adapt(limits.max_loras, limits.max_rank)
    runner = CudaRunner(model, cache(model), LIMITS, CPU)
    if limits is not None and device is not None:
        layout, targets = device.layout, model.adaptable.targets
        reader = AdapterReader(targets, limits.max_rank, layout.dtype, layout=layout)
        runner.state.adapters = AdapterStore(reader, limits, device=device)
        graphs = runner._step_graphs
        assert graphs is not None
        graphs._forget()
        for num_rows in graphs.row_sizes:  # into whose logits graphs with adapters copy theirs
            graphs._rehearse_end(num_rows, adapts=False)
    return runner


def draft_with(runner: ModelRunner, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives a runner of `interpreted_runner` a draft model."""
    from worker_svc.runner.cuda_draft_model import CudaDraftModel  # noqa: PLC0415

    model = to_have_kernels(folder, monkeypatch)
    model.fused = model._fuse()
    draft = CudaDraftModel(model, cache(model), LIMITS, runner.state)
    _launch_graphs_of(draft, monkeypatch)
    runner.draft_model = draft


def to_have_kernels(
    folder: Path, monkeypatch: pytest.MonkeyPatch, quantization: str = "auto"
) -> Decoder:
    """A model whose weights are as kernels on CUDA take them."""
    monkeypatch.setattr(compiled, "supports", lambda heads, kinds: False)
    monkeypatch.setattr(linear, "pack", lambda weight, bias: None)
    if quantization != "auto":
        monkeypatch.setattr(quantized, "keeps_float8", lambda device: True)
        monkeypatch.setattr(linear.Linear, "pack", lambda self: None)
    return load_model(folder, torch.float32, CPU, LIMITS.max_model_len, quantization=quantization)


def without_graphs(
    model: Decoder, monkeypatch: pytest.MonkeyPatch, adapters: AdapterLimits | None = None
) -> ModelRunner:
    """The runner of CUDA with a model's fused layers; it launches what graphs would replay."""
    use_few_splits(monkeypatch)
    model.fused = model._fuse()
    return launching(_runner_of(model, adapters), monkeypatch)


def launching(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    """A runner of CUDA that launches what graphs would replay."""
    _launch_graphs_of(runner, monkeypatch)
    asked = runner._asked_graphs
    if asked is None:  # steps with prompts are launched kernel by kernel
        return runner
    asked._ring.send(asked._layout.empty(), asked._buffer)
    monkeypatch.setattr(asked, "_graphs", Launches(asked._run))
    return runner


def _launch_graphs_of(holder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, decodes = holder._step_graphs, holder._decode_graphs
    monkeypatch.setattr(decodes, "_graphs", Launches(decodes._step))
    if graphs is None:
        return

    def begin(beginning: Any) -> None:
        layers = graphs._layers[beginning.adapts]
        graphs._begin(layers, beginning.size, beginning.is_decode)

    monkeypatch.setattr(graphs, "_beginnings", Launches(begin))
    monkeypatch.setattr(graphs, "_endings", Launches(graphs._end))


def use_few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divides contexts among fewer programs."""
    from kernels.attention import decode_attention  # noqa: PLC0415 - Triton must interpret

    config = decode_attention._config
    monkeypatch.setattr(
        decode_attention, "_config", lambda *shape: _with_few_splits(config(*shape))
    )


def _with_few_splits(config: Any) -> Any:
    """A context of ten blocks fills a split: hundreds are each a program to interpret."""
    return dataclasses.replace(config, num_splits=min(config.num_splits, MOST_SPLITS))


class Launch:
    """In place of a graph."""

    def __init__(self, work: object, *arguments: object) -> None:
        self.replay = partial(work, *arguments)  # type: ignore[arg-type]


class Launches:
    """In place of the graphs of all variants."""

    def __init__(self, work: object) -> None:
        self._work = work

    def __getitem__(self, variant: object) -> Launch:
        return Launch(self._work, variant)
