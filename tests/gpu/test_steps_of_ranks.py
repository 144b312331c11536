"""Steps of two ranks on two GPUs, in graphs, against one GPU's steps kernel by kernel, in float32.

Sizes of steps lie around those of graphs, a prompt among no, one and many rows that decode;
drafts are right, wrong and both.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from pagewire.v1 import worker_pb2
from tests.worker_svc.conftest import (
    WORKER_CONFIG,
    Attachment,
    Worker,
    make_prompt,
    make_sequence,
    serving,
)
from tests.worker_svc.parallel.test_tensor_parallel import save
from tests.worker_svc.ranks.test_ranks import running_group
from wire.columns import unpack
from worker_svc.runner.cuda_runner import CudaRunner
from worker_svc.runner.graphs.step_graphs import StepGraphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]

CONFIG = replace(
    WORKER_CONFIG, device="cuda", num_kv_blocks=80, max_num_seqs=24, max_num_batched_tokens=160
)
NAME = "llama-biases"
READY_S = 120  # kernels are compiled at the first start
SAMPLINGS = {
    "greedy": worker_pb2.RowSampling(top_p=1),
    "drawn": worker_pb2.RowSampling(temperature=0.8, top_p=0.95, seed=11),
    "asking": worker_pb2.RowSampling(top_p=1, repetition_penalty=1.3, logprobs=2),
}
PROMPT = make_prompt(12, seed=3)
BLOCKS = [5, 2, 9]
NUM_DRAFTED = 30


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """One GPU, none of whose steps is a graph."""
    folder = save(tmp_path_factory.mktemp("models") / "whole", NAME)
    with pytest.MonkeyPatch.context() as patch, serving(CONFIG, folder) as worker:
        assert worker.describe().description.graph_batch_sizes
        patch.setattr(StepGraphs, "map", lambda graphs, rows: None)
        patch.setattr(CudaRunner, "_is_plain", lambda runner, staged: False)
        yield worker


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Two ranks, whose steps are graphs."""
    root = tmp_path_factory.mktemp("ranks")
    options = ("device", "num_kv_blocks", "max_num_seqs", "max_num_batched_tokens")
    changes = {f"--{name.replace('_', '-')}": str(getattr(CONFIG, name)) for name in options}
    folder = save(root / "model", NAME)
    with running_group(folder, root / "log", changes, READY_S) as group, group.worker() as worker:
        description = worker.describe().description
        assert (description.world_size, description.verifies_drafts) == (2, True)
        assert description.graph_batch_sizes
        yield worker


def arriving(
    attachment: Attachment, num_decodes: int, num_tokens: int, sampling: worker_pb2.RowSampling
) -> list[int]:
    """Rows decode, a prompt comes whole into their step, then another in two chunks; all tokens."""
    decodes = list(range(num_decodes))
    new = [
        make_sequence(slot, make_prompt(5, seed=slot), [1 + 2 * slot, 2 + 2 * slot],
                      sampling=sampling)
        for slot in decodes
    ]  # fmt: skip
    told = []
    if decodes:
        told += attachment.step(new_sequences=new, slots=decodes, num_scheduled=[5] * num_decodes)
    whole, chunked = num_decodes, num_decodes + 1
    blocks = iter(range(45, 80))
    prompts = {
        slot: make_sequence(
            slot, make_prompt(length, seed=length), [next(blocks) for _ in range(most)],
            sampling=sampling,
        )
        for slot, length, most in ((whole, num_tokens, 12), (chunked, num_tokens // 2 + 2, 8))
    }  # fmt: skip
    ones = [1] * num_decodes
    told += attachment.step(
        new_sequences=[prompts[whole]], slots=[*decodes, whole], num_scheduled=[*ones, num_tokens]
    )
    rows = [*decodes, whole, chunked]
    first = num_tokens // 2
    told += attachment.step(
        new_sequences=[prompts[chunked]], slots=rows, num_scheduled=[*ones, 1, first]
    )
    told += attachment.step(slots=rows, num_scheduled=[*ones, 1, 2])
    for _ in range(3):
        told += attachment.step(slots=rows, num_scheduled=[*ones, 1, 1])
    return told


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("num_decodes", [0, 1, 20])
def test_around_every_size_ranks_give_the_tokens_of_eager_steps(
    eager: Worker, ranks: Worker, num_decodes: int, sampling: worker_pb2.RowSampling
) -> None:
    for size in (16, 32, 64, 128):
        for total in (size - 1, size, size + 1):
            num_tokens = total - num_decodes
            if num_tokens < 1:
                continue
            expected = arriving(eager.attach(), num_decodes, num_tokens, sampling)
            found = arriving(ranks.attach(), num_decodes, num_tokens, sampling)
            assert found == expected, total


def decoded(worker: Worker, sampling: worker_pb2.RowSampling) -> list[int]:
    """The tokens after PROMPT, without drafts."""
    attachment = worker.attach()
    new = [make_sequence(0, PROMPT, BLOCKS, sampling=sampling)]
    tokens = attachment.step(new_sequences=new, slots=[0], num_scheduled=[len(PROMPT)])
    while len(tokens) < NUM_DRAFTED:
        tokens += attachment.step(slots=[0], num_scheduled=[1])
    return tokens


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_drafts_change_no_token_of_two_gpus(
    eager: Worker, ranks: Worker, sampling: worker_pb2.RowSampling
) -> None:
    expected = decoded(eager, sampling)
    assert len(set(expected)) > 1
    assert decoded(ranks, sampling) == expected
    attachment = ranks.attach()
    new = [make_sequence(0, PROMPT, BLOCKS, sampling=sampling)]
    tokens = attachment.step(new_sequences=new, slots=[0], num_scheduled=[len(PROMPT)])
    for right, wrong in ((3, 0), (1, 2), (0, 2), (4, 1), (0, 0), (7, 0)):
        following = expected[len(tokens) :][: right + wrong]
        drafts = following[:right] + [(token + 1) % 64 for token in following[right:]]
        attachment.send(
            slots=[0], num_scheduled=[1 + len(drafts)],
            num_drafted=[len(drafts)], draft_token_ids=drafts,
        )  # fmt: skip
        output = attachment.receive()
        assert output.error == "" and output.row_status == b""
        found = unpack(output.token_ids).tolist()
        assert len(found) == right + 1
        tokens += found
    assert tokens == expected[: len(tokens)]
