"""On CPU a token's logits are the same bits however its sequence is computed, in every type.

That is what makes tokens equal after a worker's death or a preemption, in chunks of a prompt, and
where drafts are verified: no near tie can fall otherwise.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.harness import checkpoints
from kernels.cpu import isa
from tests.worker_svc.random_models import save_random_model
from worker_svc.attention.batch import AttentionBatch
from worker_svc.attention.kv_cache import KVCache
from worker_svc.models import Decoder, load_model

CPU, BLOCK_SIZE, NUM_TOKENS = torch.device("cpu"), 16, 103
CONFIG = {
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
TYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = torch.float8_e4m3fn
# Each type with each rounding and cache on the fastest instruction set, each set with bfloat16.
CASES = [
    pytest.param(name, dtype, rounding, kv_dtype, id="-".join(map(str, (name, dtype, *rest))))
    for name in (one.name for one in isa.available())
    for dtype in TYPES
    for rest in (("auto", None), ("int8", None), ("int4", None), ("auto", FP8))
    for rounding, kv_dtype in (rest,)
    if name == isa.available()[0].name or (dtype == torch.bfloat16 and kv_dtype is None)
]
# Steps, and the numbers of tokens of a step's rows: rows of one sequence, one after the other.
WAYS = {
    "chunks": [[1], [7], [33], [2], [60]],
    "decoded": [[NUM_TOKENS - 4], [1], [1], [1], [1]],
    "verified": [[NUM_TOKENS - 13], [5], [1], [4], [3]],
    "among 6": [[NUM_TOKENS - 7], [1] * 7],
    "among 31": [[NUM_TOKENS - 40], [1] * 32, [3, 5]],
    "among 102": [[1] * NUM_TOKENS],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "qwen3"
    save_random_model(path, (Qwen3Config, Qwen3ForCausalLM), CONFIG)
    return path


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Hundreds of small products, in which threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def logits_of(model: Decoder, token_ids: Tensor, steps: list[list[int]]) -> Tensor:
    """Logits [T, vocab] after every token."""
    cache = model.new_cache(1 + -(-NUM_TOKENS // BLOCK_SIZE), BLOCK_SIZE)
    begin, found = 0, []
    for sizes in steps:
        found.append(step(model, cache, token_ids, begin, sizes))
        begin += sum(sizes)
    assert begin == NUM_TOKENS
    return torch.cat(found)


def step(model: Decoder, cache: KVCache, token_ids: Tensor, begin: int, sizes: list[int]) -> Tensor:
    """One step, whose rows continue the sequence from `begin` on, each where the last one ends."""
    ends = begin + torch.tensor(sizes).cumsum(0)
    end, table = int(ends[-1]), 1 + torch.arange(-(-NUM_TOKENS // BLOCK_SIZE), dtype=torch.int32)
    positions = torch.arange(begin, end)
    batch = AttentionBatch(
        slot_mapping=BLOCK_SIZE + positions,
        block_tables=table.expand(len(sizes), -1),
        context_lens=ends.int(),
        cu_seqlens_q=torch.tensor([0, *(ends - begin).tolist()], dtype=torch.int32),
        max_seqlen_q=max(sizes),
        max_context_len=end,
    )
    return model.logits(model.forward(token_ids[begin:end], positions, cache, batch))


@pytest.mark.parametrize(("name", "dtype", "rounding", "kv_dtype"), CASES)
def test_logits_are_the_same_bits_however_a_sequence_is_computed(
    folder: Path,
    name: str,
    dtype: torch.dtype,
    rounding: str,
    kv_dtype: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(isa.VARIABLE, name)
    check(load_model(folder, dtype, CPU, 256, quantization=rounding, kv_dtype=kv_dtype), name)


@pytest.mark.parametrize("name", [one.name for one in isa.available()])
def test_a_checkpoint_of_four_bits_whose_inputs_are_not_rounded_has_the_same_bits(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(isa.VARIABLE, name)
    folder = checkpoints.write(tmp_path, "tiny", int4_group=32)
    check(load_model(folder, torch.bfloat16, CPU, 256), name)


def check(model: Decoder, name: str) -> None:
    """Computes a sequence in every way, with kernels of this instruction set."""
    if model.attention_backend != f"c/{name}":
        pytest.skip(f"no C compiler for {name}")
    token_ids = torch.randint(0, 300, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))
    expected = logits_of(model, token_ids, [[NUM_TOKENS]])
    assert expected.isfinite().all() and len(expected.argmax(1).unique()) > 20
    for way, steps in WAYS.items():
        assert torch.equal(logits_of(model, token_ids, steps), expected), way
