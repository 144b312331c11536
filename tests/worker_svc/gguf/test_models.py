"""A GGUF file computes what its dequantized twin computes, for every type and architecture."""

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from kernels.quantized.grouped import GroupedWeight
from pagewire.gguf.blocks import BITS
from pagewire.gguf.types import TENSOR_TYPES
from tests.gguf_files import GgufFile, Packed
from tests.worker_svc.gguf.conftest import as_gguf, dequantized, save
from worker_svc.attention.batch import AttentionBatch
from worker_svc.models import Decoder, load_model
from worker_svc.models import config as model_config
from worker_svc.models.sharding import Sharding
from worker_svc.models.stored.gguf import load_gguf
from worker_svc.models.stored.weight_files import MissingWeight
from worker_svc.models.weights import Filling, Share

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_STEPS = 16, 6
TYPES = [each.name for each in TENSOR_TYPES.values()]


def load(path: Path) -> Decoder:
    return load_model(path, torch.float32, CPU, 128)


def greedy(model: Decoder, prompt: list[int]) -> tuple[list[int], Tensor]:
    """Tokens after a prompt, and the logits [steps, vocab] that they were taken from."""
    num_blocks = -(-(len(prompt) + NUM_STEPS) // BLOCK_SIZE)
    cache = model.new_cache(1 + num_blocks, BLOCK_SIZE)
    model.make_states(1, 0)
    slots = torch.zeros(1, dtype=torch.int64)
    table = torch.arange(1, 1 + num_blocks, dtype=torch.int32)[None]
    ids, rows, num_computed = list(prompt), [], 0
    for _ in range(NUM_STEPS):
        at = torch.arange(num_computed, len(ids))
        written = table[0].long()[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
        lens = torch.tensor([len(ids)], dtype=torch.int32)
        starts = torch.tensor([0, *accumulate([len(at)])], dtype=torch.int32)
        batch = AttentionBatch(written, table, lens, starts, len(at), len(ids), slots=slots)
        hidden = model.forward(torch.tensor(ids[num_computed:]), at, cache, batch)
        rows.append(model.logits(hidden[-1:])[0])
        num_computed = len(ids)
        ids.append(int(rows[-1].argmax()))
    return ids[len(prompt) :], torch.stack(rows)


@pytest.mark.parametrize("kind", TYPES)
def test_a_file_of_each_type_computes_what_its_dequantized_twin_does(
    kind: str, prompt: list[int], llama: PreTrainedModel, tmp_path: Path
) -> None:
    vectors = kind if kind in ("F16", "BF16") else "F32"
    file = as_gguf(llama, "llama", kind, vectors)
    assert {tensor.type_name for tensor in file.tensors.values()} <= {kind, vectors}
    ours = load(file.write(tmp_path / "model.gguf"))
    llama.config.save_pretrained(tmp_path / "twin")
    save_file(dequantized("llama", file), tmp_path / "twin" / "model.safetensors")
    theirs = load(tmp_path / "twin")
    tokens, logits = greedy(ours, prompt)
    expected_tokens, expected = greedy(theirs, prompt)
    assert tokens == expected_tokens
    if kind in BITS:  # multiplied as integers, with sums in another order
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    else:
        assert torch.equal(logits, expected)
    assert logits.std(-1).min() > 0.1  # or equality would say little


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_each_architecture_computes_what_transformers_does(
    name: str, is_tied: bool, prompt: list[int], tmp_path: Path
) -> None:
    oracle = save(tmp_path / "folder", name, tie_word_embeddings=is_tied)
    file = as_gguf(oracle, name)
    assert ("output.weight" in file.tensors) is not is_tied
    assert ("blk.1.attn_q.bias" in file.tensors) is (name == "qwen2")
    check(file.write(tmp_path / "model.gguf"), oracle, prompt)


def test_every_fourth_layer_of_smollm3_does_not_rotate(prompt: list[int], tmp_path: Path) -> None:
    told = {"num_hidden_layers": 5, "pad_token_id": 2, "bos_token_id": None, "eos_token_id": 2}
    oracle = save(tmp_path / "folder", "smollm3", **told)
    assert oracle.config.no_rope_layers == [1, 1, 1, 0, 1]
    check(as_gguf(oracle, "smollm3").write(tmp_path / "model.gguf"), oracle, prompt)


def check(path: Path, oracle: Any, prompt: list[int]) -> None:
    """Asserts that a file's logits and tokens are those of a model of transformers."""
    tokens, logits = greedy(load(path), prompt)
    with torch.no_grad():
        expected = oracle(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    assert tokens == expected.argmax(-1).tolist()


@pytest.mark.parametrize("biases", [("attention_bias",), ("mlp_bias",)])
def test_biases_of_a_llama_are_found_and_its_query_biases_reordered(
    biases: tuple[str, ...], prompt: list[int], tmp_path: Path
) -> None:
    oracle = save(tmp_path / "folder", "llama", **dict.fromkeys(biases, True))
    check(as_gguf(oracle, "llama").write(tmp_path / "model.gguf"), oracle, prompt)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def llama3_factors(file: GgufFile, oracle: Any) -> None:
    """As the converter writes them: the plain frequencies over the scaled ones."""
    plain = 1.0 / 10000.0 ** (torch.arange(0, 64, 2).float() / 64)
    factors = plain / oracle.model.rotary_emb.inv_freq.float()
    assert factors.min() == 1 and factors.max() == 8
    file.tensors["rope_freqs.weight"] = Packed(factors.numpy(), "F32")


def linear(file: GgufFile, oracle: Any) -> None:
    file.metadata |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}


def yarn(file: GgufFile, oracle: Any) -> None:
    told = {"type": "yarn", "factor": 4.0, "original_context_length": 64, "finetuned": True}
    file.metadata |= {f"llama.rope.scaling.{key}": value for key, value in told.items()}


@pytest.mark.parametrize(
    ("scaling", "tell"),
    [
        (LLAMA3, llama3_factors),
        ({"rope_type": "linear", "factor": 4.0}, linear),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            yarn,
        ),
    ],
)
def test_scaled_rotations_are_those_of_transformers(
    scaling: dict[str, Any],
    tell: Callable[[GgufFile, Any], None],
    prompt: list[int],
    tmp_path: Path,
) -> None:
    oracle = save(tmp_path / "folder", "llama", rope_parameters={"rope_theta": 10000.0, **scaling})
    file = as_gguf(oracle, "llama")
    tell(file, oracle)
    check(file.write(tmp_path / "model.gguf"), oracle, 2 * prompt)


class Recorded:
    """A destination that keeps integers."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.found: GroupedWeight | None = None

    def copy_(self, values: Tensor, /) -> None:
        pytest.fail("integers were asked for")

    def put_narrow(self, values: GroupedWeight, /) -> None:
        self.found = values


@pytest.mark.parametrize("kind", list(BITS))
def test_integers_stay_integers_where_they_are_taken(
    kind: str, llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = as_gguf(llama, "llama", kind)
    path = file.write(tmp_path / "model.gguf")
    expected = dequantized("llama", file)
    recorded = {
        name: Recorded(tuple(values.shape)) if values.ndim == 2 else torch.empty_like(values)
        for name, values in expected.items()
    }
    load_gguf(path, Filling(recorded), CPU, keeps_integers=True)
    for name, destination in recorded.items():
        if isinstance(destination, Recorded):
            assert destination.found is not None
            assert destination.found.bits == BITS[kind]
            assert torch.equal(destination.found.dequantized(), expected[name]), name
        else:
            assert torch.equal(destination, expected[name]), name


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["F16", "Q4_0", "Q6_K"])
def test_each_rank_reads_its_share(
    kind: str, size: int, llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewire.gguf.blocks.ELEMENTS_AT_ONCE", 3 * 256)  # rows in several parts
    file = as_gguf(llama, "llama", kind)
    path = file.write(tmp_path / "model.gguf")
    whole = dequantized("llama", file)
    config = model_config.load(path)
    for rank in range(size):
        sharding = Sharding(config, rank, size)
        parts = {name: part_of(values, sharding.share(name)) for name, values in whole.items()}
        filled = {name: torch.empty_like(part) for name, part in parts.items()}
        load_gguf(path, Filling(filled, share=sharding.share), CPU, keeps_integers=False)
        for name, part in parts.items():
            assert torch.equal(filled[name], part), (rank, name)


def part_of(values: Tensor, share: Share | None) -> Tensor:
    return values if share is None else values.chunk(share.count, share.dim)[share.index]


def test_a_bias_that_one_layer_lacks_is_missed_by_name(tmp_path: Path) -> None:
    file = as_gguf(save(tmp_path / "folder", "qwen2"), "qwen2")
    del file.tensors["blk.1.attn_k.bias"]
    with pytest.raises(MissingWeight, match=r"model\.layers\.1\.self_attn\.k_proj\.bias"):
        load(file.write(tmp_path / "model.gguf"))
