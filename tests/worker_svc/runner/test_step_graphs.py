"""What step graphs repeat, run once by Triton's interpreter: maps, tiles and both halves of a step.

The runner of CUDA on the CPU: in place of replaying a graph it launches what is captured in it.
"""

import dataclasses
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.worker_svc.conftest import make_prompt
from worker_svc.attention.kv_cache import KVCache
from worker_svc.models import compiled, linear
from worker_svc.models import config as model_config
from worker_svc.models.decoder import Decoder, load_model
from worker_svc.models.weights import load_weights
from worker_svc.protocol.step import Limits, NewSequence, RowSampling, StepInput
from worker_svc.runner.eager_runner import EagerRunner
from worker_svc.runner.model_runner import ModelRunner

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1" or torch.cuda.is_available(),
        reason="Triton does not interpret here",
    ),
    # Rows of padding hold what memory held before.
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]

CPU = torch.device("cpu")
BLOCK_SIZE, BLOCKS_PER_SEQ = 8, 10
LIMITS = Limits(
    num_blocks=1 + 6 * BLOCKS_PER_SEQ,
    block_size=BLOCK_SIZE,
    max_num_seqs=6,
    max_num_batched_tokens=96,
    max_model_len=BLOCK_SIZE * BLOCKS_PER_SEQ,
    vocab_size=128,
)
GREEDY = RowSampling()
DRAWN = RowSampling(temperature=1.2, seed=4)
FILTERED = RowSampling(temperature=1.1, top_k=7, seed=2)
ASKING = RowSampling(presence_penalty=0.9, logit_bias=((5, 2.0),), num_top_logprobs=2)


def cache(model: Decoder) -> KVCache:
    config = model.config
    return KVCache(
        config.num_layers, LIMITS.num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim,
        torch.float32, CPU,
    )  # fmt: skip


@pytest.fixture
def eager(llama_folder: Path) -> ModelRunner:
    model = load_model(llama_folder, torch.float32, CPU, LIMITS.max_model_len)
    return EagerRunner(model, cache(model), LIMITS, CPU)


@pytest.fixture
def interpreted(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch, few_programs: None
) -> Iterator[ModelRunner]:
    """Fused layers on the CPU, and no graph around what graphs launch."""
    from worker_svc.runner.cuda_runner import CudaRunner  # noqa: PLC0415 - Triton must interpret

    monkeypatch.setattr(compiled, "supports", lambda config: False)
    monkeypatch.setattr(linear, "pack", lambda weight, bias: None)
    config = model_config.load(llama_folder)
    model = Decoder(config, torch.float32, CPU, LIMITS.max_model_len)
    load_weights(llama_folder, dict(model.destinations()), frozenset(), model.sharding.share)
    model.pack()
    model.fused = model._fuse()
    runner = CudaRunner(model, cache(model), LIMITS, CPU)
    graphs, decodes = runner._step_graphs, runner._decode_graphs
    graphs._beginnings = {n: Launch(graphs._begin, graphs._layers, n) for n in graphs.sizes}
    graphs._decodes = {
        n: Launch(graphs._begin, graphs._layers, n, True) for n in graphs.decode_sizes
    }
    monkeypatch.setattr(graphs, "_endings", Launches(graphs._end))
    monkeypatch.setattr(decodes, "_graphs", Launches(decodes._step))
    yield runner


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


def enter(slot: int, prompt: list[int], sampling: RowSampling = GREEDY) -> NewSequence:
    return NewSequence(
        slot=slot,
        request_id=str(slot),
        token_ids=np.array(prompt, dtype=np.int32),
        num_prompt_tokens=len(prompt),
        num_computed_tokens=0,
        block_ids=np.arange(BLOCKS_PER_SEQ, dtype=np.int32) + 1 + slot * BLOCKS_PER_SEQ,
        sampling=sampling,
    )


def play(runner: ModelRunner, *steps: tuple[dict[int, int], tuple[NewSequence, ...]]) -> list:
    """The tokens of each step, and the log probabilities of those that have any."""
    found = []
    for index, (rows, new) in enumerate(steps):
        output = runner.execute(
            StepInput(
                step_id=1 + index,
                reset=index == 0,
                new_sequences=new,
                slots=np.array(list(rows)),
                num_scheduled=np.array(list(rows.values())),
            )
        )
        assert not output.error, output.error
        tops = None if output.logprobs is None else output.logprobs.top_token_ids.tolist()
        found.append((output.token_ids.tolist(), tops))
    return found


def test_prompts_chunks_and_decodes_give_the_tokens_of_the_eager_runner(
    eager: ModelRunner, interpreted: ModelRunner
) -> None:
    first, second, third = (make_prompt(n, seed=n) for n in (13, 40, 3))
    # Another prompt that begins as the second one, whose blocks it reads.
    cached = dataclasses.replace(enter(5, second[:24] + first, FILTERED), num_computed_tokens=24)
    blocks = np.concatenate([1 + 4 * BLOCKS_PER_SEQ + np.arange(3), cached.block_ids[3:]])
    cached = dataclasses.replace(cached, block_ids=blocks.astype(np.int32))
    steps = [
        ({1: 13, 4: 21}, (enter(1, first), enter(4, second, DRAWN))),
        ({1: 1, 4: 16, 0: 3}, (enter(0, third),)),
        ({4: 3, 0: 1, 1: 1}, ()),
        ({0: 1, 5: 13, 1: 1, 4: 1}, (cached,)),
        ({0: 1, 1: 1, 4: 1, 5: 1}, ()),
    ]
    assert play(interpreted, *steps) == play(eager, *steps)


def test_rows_that_ask_for_more_give_the_tokens_of_the_eager_runner(
    eager: ModelRunner, interpreted: ModelRunner
) -> None:
    new = (enter(2, make_prompt(9), ASKING), enter(3, make_prompt(17, seed=2), DRAWN))
    steps = [({2: 9, 3: 17}, new), ({3: 1, 2: 1}, ()), ({2: 1, 3: 1}, ())]
    found = play(interpreted, *steps)
    assert found == play(eager, *steps)
    assert all(tops is not None for _, tops in found)
