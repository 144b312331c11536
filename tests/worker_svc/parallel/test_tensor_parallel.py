"""Tensor parallelism with ranks as threads of this process: the same tokens as on one rank."""

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._C._distributed_c10d import HashStore
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.pace import paced
from tests.worker_svc.conftest import VOCAB_SIZE, WORKER_CONFIG, make_prompt
from tests.worker_svc.models.test_models import (
    DOTS1,
    GPT_OSS,
    MIXTRAL,
    NO_IDS,
    QWEN2_MOE,
    QWEN3_MOE,
    SMOLLM3,
)
from tests.worker_svc.random_models import Family, save_random_model
from wire.logprobs import LogprobColumns
from worker_svc.config import WorkerConfig
from worker_svc.models import config
from worker_svc.models.sharding import Sharding
from worker_svc.models.spec import UnsupportedModel
from worker_svc.models.weights import WrongShape
from worker_svc.parallel import group as parallel
from worker_svc.parallel.group import Group, RankFailed
from worker_svc.protocol.step import NewSequence, Pooling, RowSampling, StepInput, StepOutput
from worker_svc.runner.model_runner import ModelRunner
from worker_svc.startup import startup

T = TypeVar("T")
CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
FAMILIES: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama": ((LlamaConfig, LlamaForCausalLM), {"num_key_value_heads": 4}),
    "llama-biases": (
        (LlamaConfig, LlamaForCausalLM),
        {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-eight-heads": (
        (LlamaConfig, LlamaForCausalLM),
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "qwen2-one-kv-head": ((Qwen2Config, Qwen2ForCausalLM), {"num_key_value_heads": 1}),
    "qwen3-tied": (
        (Qwen3Config, Qwen3ForCausalLM),
        {"num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True},
    ),
    "qwen3-moe": (  # the first layer has one MLP
        QWEN3_MOE,
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [0],
            "norm_topk_prob": True,
        },
    ),
    "qwen2-moe": (
        QWEN2_MOE,
        {
            "num_key_value_heads": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "dots1": (
        DOTS1,
        {
            "num_key_value_heads": 2,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
        },
    ),
    "mixtral": (MIXTRAL, {"num_key_value_heads": 2, "num_local_experts": 4}),
    "gpt-oss": (
        GPT_OSS,
        NO_IDS
        | {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 9}
        | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "smollm3": (SMOLLM3, NO_IDS | {"num_key_value_heads": 2, "no_rope_layer_interval": 2}),
    "gemma3": (
        (Gemma3TextConfig, Gemma3ForCausalLM),
        NO_IDS
        | {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 9}
        | {"tie_word_embeddings": False},
    ),
}
GREEDY = RowSampling(num_top_logprobs=3)
DICE = RowSampling(temperature=0.9, seed=7, top_p=0.95)
PENALIZED = RowSampling(repetition_penalty=1.3, logit_bias=((5, 2.0),), num_prompt_logprobs=2)
POOLED = RowSampling(pooling=Pooling.MEAN)


def save(folder: Path, name: str) -> Path:
    family, changes = FAMILIES[name]
    save_random_model(folder, family, SHAPE | changes)
    return folder


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in folders:
            folders[name] = save(tmp_path_factory.mktemp(name), name)
        return folders[name]

    return get


def on_ranks(size: int, work: Callable[[Group], T]) -> list[T]:
    """Runs work on each rank of a new group; returns the results by rank."""
    store = HashStore()

    def run(rank: int) -> T:
        return work(parallel.join(rank, size, store, CPU))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def build(folder: Path, group: Group) -> ModelRunner:
    loaded = startup.load(WORKER_CONFIG, folder, "float32", "", group)
    return startup.build_runner(WORKER_CONFIG, loaded, num_blocks=64)


def sequence(slot: int, prompt: list[int], blocks: list[int], sampling: RowSampling) -> NewSequence:
    return NewSequence(
        slot=slot,
        request_id=f"request-{slot}",
        token_ids=np.array(prompt, dtype=np.int32),
        num_prompt_tokens=len(prompt),
        num_computed_tokens=0,
        block_ids=np.array(blocks, dtype=np.int32),
        sampling=sampling,
        prompt_only=sampling.pooling is not None,
    )


def column(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def run_requests(runner: ModelRunner) -> list[StepOutput]:
    """Steps with whole prompts, chunks, decodes, pooling, and a sequence moved to other blocks."""
    prompts = [make_prompt(length, seed=length) for length in (20, 33, 7, 18)]
    steps = [
        StepInput(
            step_id=1,
            reset=True,
            new_sequences=(
                sequence(0, prompts[0], [1, 5, 9], GREEDY),
                sequence(1, prompts[1], [2, 6, 10], DICE),
            ),
            slots=column(0, 1),
            num_scheduled=column(20, 16),
        ),
        StepInput(
            step_id=2,
            new_sequences=(
                sequence(2, prompts[2], [3, 7], PENALIZED),
                sequence(3, prompts[3], [4, 8], POOLED),
            ),
            slots=column(0, 1, 2, 3),
            num_scheduled=column(1, 17, 7, 18),
        ),
        StepInput(step_id=3, freed_slots=column(3), slots=column(0, 1, 2)),
        *(StepInput(step_id=step_id, same_rows=True) for step_id in range(4, 10)),
    ]
    outputs = [runner.execute(step) for step in steps]
    again = sequence(3, prompts[0], [30, 20, 40], GREEDY)  # as after a preemption
    outputs.append(
        runner.execute(
            StepInput(
                step_id=10,
                freed_slots=column(0),
                new_sequences=(again,),
                slots=column(1, 3),
                num_scheduled=column(1, 20),
                wants_state=True,
            )
        )
    )
    return outputs


def assert_alike(ours: LogprobColumns | None, theirs: LogprobColumns | None) -> None:
    """Asserts equal tokens, and log probabilities equal up to rounding."""
    if ours is None or theirs is None:
        assert ours is theirs
        return
    for field in dataclasses.fields(ours):
        one, other = getattr(ours, field.name), getattr(theirs, field.name)
        np.testing.assert_allclose(one, other, atol=1e-4)


def assert_same(ours: list[StepOutput], theirs: list[StepOutput]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.error == other.error == ""
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert_alike(one.logprobs, other.logprobs)
        for prompt_output, expected in zip(one.prompt_outputs, other.prompt_outputs, strict=True):
            assert_alike(prompt_output.logprobs, expected.logprobs)
            if expected.hidden_sum is not None:
                np.testing.assert_allclose(prompt_output.hidden_sum, expected.hidden_sum, atol=1e-3)
    assert any(output.prompt_outputs for output in theirs)
    assert ours[-1].state is not None
    assert theirs[-1].state is not None
    assert ours[-1].state.hashes.tolist() == theirs[-1].state.hashes.tolist()


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama", 2),
        ("llama", 4),
        ("llama-biases", 2),
        ("llama-biases", 4),
        ("llama-eight-heads", 2),
        ("llama-eight-heads", 4),
        ("llama-eight-heads", 8),
        ("qwen2-one-kv-head", 2),
        ("qwen3-tied", 2),
        ("qwen3-tied", 4),
        ("smollm3", 2),
        ("gemma3", 2),
    ],
)
def test_every_rank_gives_the_tokens_that_one_alone_gives(
    folder_of: Callable[[str], Path], name: str, size: int
) -> None:
    folder = folder_of(name)
    alone = run_requests(build(folder, parallel.ALONE))
    assert len({token for output in alone for token in output.token_ids.tolist()}) > 8
    for outputs in on_ranks(size, lambda group: run_requests(build(folder, group))):
        assert_same(outputs, alone)


def test_a_forward_pass_adds_up_once_after_attention_once_after_the_mlp_and_once_for_embeddings(
    folder_of: Callable[[str], Path],
) -> None:
    folder = folder_of("llama")

    def count(group: Group) -> int:
        runner = build(folder, group)
        before = group.num_collectives
        step = sequence(0, make_prompt(5), [1], RowSampling())
        rows = {"slots": column(0), "num_scheduled": column(5)}
        runner.execute(StepInput(step_id=1, reset=True, new_sequences=(step,), **rows))
        return group.num_collectives - before

    assert on_ranks(2, count) == [2 * SHAPE["num_hidden_layers"] + 1 + 1] * 2  # embedding, logits
    assert count(parallel.ALONE) == 0


def test_a_rank_reads_its_part_of_every_divided_tensor(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama-biases")
    tensors = load_file(folder / "model.safetensors")
    whole = config.load(folder)
    for rank in range(4):
        sharding = Sharding(whole, rank, 4)
        query = sharding.share("model.layers.0.self_attn.q_proj.weight")
        key = sharding.share("model.layers.0.self_attn.k_proj.bias")
        output = sharding.share("model.layers.1.self_attn.o_proj.weight")
        assert query is not None and key is not None and output is not None
        assert (query.dim, query.index, query.count) == (0, rank, 4)
        assert (key.dim, key.index, key.count) == (0, rank // 2, 2)  # two ranks per KV head
        assert (output.dim, output.index, output.count) == (1, rank, 4)
        tensor = tensors["model.layers.1.self_attn.o_proj.weight"]
        assert torch.equal(output.cut(tensor, 16), tensor[:, 16 * rank : 16 * (rank + 1)])
        assert sharding.share("model.layers.0.self_attn.o_proj.bias") is None
        assert sharding.share("model.norm.weight") is None


@pytest.mark.parametrize(
    ("part", "changes", "size", "named"),
    [
        ("mixer", {"num_heads": 6, "num_kv_heads": 6}, 4, "num_attention_heads: 6"),
        ("feed", {"intermediate_size": 97}, 2, "intermediate_size: 97"),
        ("model", {"vocab_size": 127}, 2, "vocab_size: 127"),
        ("mixer", {"num_heads": 12, "num_kv_heads": 6}, 4, "num_key_value_heads: 6"),
        ("mixer", {"num_heads": 12, "num_kv_heads": 3}, 4, "4 ranks are no multiple of 3"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_by_name(
    folder_of: Callable[[str], Path],
    part: str,
    changes: dict[str, int],
    size: int,
    named: str,
) -> None:
    whole = config.load(folder_of("llama"))
    if part == "model":
        whole = dataclasses.replace(whole, **changes)
    else:
        layer = whole.uniform
        changed = dataclasses.replace(getattr(layer, part), **changes)
        layers = (layer, dataclasses.replace(layer, **{part: changed}))
        whole = dataclasses.replace(whole, layers=layers)
    with pytest.raises(UnsupportedModel, match=named):
        Sharding(whole, 0, size)


def test_a_checkpoint_of_other_shapes_is_refused_with_the_whole_shape(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = folder_of("llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(64, 90)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())

    def load(group: Group) -> str:
        with pytest.raises(WrongShape) as raised:
            group.together(lambda: startup.load(WORKER_CONFIG, tmp_path, "float32", "", group))
        return str(raised.value)

    message = "model.layers.0.mlp.down_proj.weight: has shape (64, 90), expected (64, 96)"
    assert on_ranks(2, load) == [message] * 2


def test_what_fails_on_one_rank_fails_on_all_and_names_it() -> None:
    def work(group: Group) -> str:
        def fail_on_the_last() -> None:
            if group.rank == 1:
                raise MemoryError("no room")

        with pytest.raises((MemoryError, RankFailed)) as raised:
            group.together(fail_on_the_last)
        assert group.together(lambda: "next") == "next"
        return str(raised.value)

    assert on_ranks(2, work) == ["rank 1: MemoryError: no room", "no room"]


def test_what_rank_0_says_is_said_on_all() -> None:
    assert on_ranks(3, lambda group: group.of_first(lambda: str(group.rank))) == ["0"] * 3


def test_the_cache_is_as_large_as_the_smallest_rank_has_room_for() -> None:
    assert on_ranks(3, lambda group: group.smallest(lambda: 90 - 7 * group.rank)) == [76] * 3


class Failing:
    """A model that fails on some ranks, after some of its collectives."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.is_failing = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, *inputs: Any) -> torch.Tensor:
        if self.is_failing:
            raise torch.OutOfMemoryError("no memory")
        hidden: torch.Tensor = self._model.forward(*inputs)
        return hidden


def run_failing(folder: Path, group: Group, is_failing: bool) -> tuple[str, list[int]]:
    """The error of a step that fails on some ranks, and the tokens of the same step repeated."""
    loaded = startup.load(WORKER_CONFIG, folder, "float32", "", group)
    model = Failing(loaded.decoder)
    runner = startup.build_runner(WORKER_CONFIG, dataclasses.replace(loaded, decoder=model), 64)
    new = sequence(0, make_prompt(5), [1], RowSampling())
    step = StepInput(
        step_id=1, reset=True, new_sequences=(new,), slots=column(0), num_scheduled=column(5)
    )
    model.is_failing = is_failing
    error = runner.execute(step).error
    model.is_failing = False
    return error, runner.execute(step).token_ids.tolist()


def test_a_step_that_fails_on_every_rank_is_a_failed_step(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama")
    _, expected = run_failing(folder, parallel.ALONE, is_failing=False)
    for error, tokens in on_ranks(2, lambda group: run_failing(folder, group, is_failing=True)):
        assert error == "OutOfMemoryError: no memory"
        assert tokens == expected


class GaveUp(BaseException):
    """Raised in place of the end of a process."""


def test_a_rank_on_which_a_step_fails_alone_gives_up(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of("llama")
    monkeypatch.setattr(parallel, "FAILURE_TIMEOUT", timedelta(seconds=paced(0.2)))
    monkeypatch.setattr(parallel, "COLLECTIVE_TIMEOUT", timedelta(seconds=paced(1)))

    def give_up(reason: str) -> None:
        raise GaveUp(reason)

    def run(group: Group) -> str:
        group._give_up = give_up
        with pytest.raises(GaveUp) as raised:
            run_failing(folder, group, is_failing=group.rank == 1)
        return str(raised.value)

    assert "rank 1: a step failed here and not on every rank" in on_ranks(2, run)[1]


def test_peer_memory_is_refused_where_there_is_none() -> None:
    with pytest.raises(ValueError, match="all_reduce: peer must be auto for one rank"):
        WorkerConfig(all_reduce="peer")
    with pytest.raises(ValueError, match="all_reduce: ring must be one of auto, peer, nccl"):
        WorkerConfig(all_reduce="ring", tensor_parallel_size=2)
    with pytest.raises(ValueError, match="all_reduce: peer is for CUDA devices"):
        parallel.join(0, 2, HashStore(), CPU, all_reduce="peer")
