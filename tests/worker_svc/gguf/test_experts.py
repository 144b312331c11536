"""A GGUF file with experts computes what transformers computes of the same numbers."""

from collections import Counter
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cpu.library import Library
from pagewire.gguf.header import read_header
from pagewire.gguf.stored import stored_weights
from tests.gguf_experts import FAMILIES, dequantized, file_of, random_model
from tests.gguf_files import GgufFile
from tests.worker_svc.gguf.test_models import TYPES, check, part_of
from worker_svc.config import WorkerConfig
from worker_svc.models import Decoder
from worker_svc.models import config as model_config
from worker_svc.models.linear import Linear
from worker_svc.models.mxfp4_experts import CodeRows
from worker_svc.models.sharding import Sharding
from worker_svc.models.spec import UnsupportedModel
from worker_svc.models.stored.gguf import load_gguf
from worker_svc.models.weights import Filling
from worker_svc.parallel.group import Group
from worker_svc.quantization.mxfp4 import widened
from worker_svc.startup import startup

CPU = torch.device("cpu")
KINDS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def experts_in(kind: str) -> Any:
    """The types of a file's matrices: experts of this one, the others in float32."""
    return lambda stored: kind if stored.split(".")[-2].endswith(("exps", "shexp")) else "F32"


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts of the weights that the C library packs, by form."""
    counts: Counter[str] = Counter()
    for name in ("pack", "pack_groups", "pack_mxfp4"):
        original = getattr(Library, name)

        def counted(*args: Any, of: str = name, call: Any = original, **options: Any) -> Any:
            counts[of] += 1
            return call(*args, **options)

        monkeypatch.setattr(Library, name, counted)
    return counts


@pytest.mark.parametrize("name", FAMILIES)
def test_each_architecture_computes_what_transformers_does(
    name: str, prompt: list[int], tmp_path: Path
) -> None:
    oracle = random_model(name)
    check(file_of(oracle, name).write(tmp_path / "model.gguf"), oracle, prompt)


@pytest.mark.parametrize("first", range(3))
def test_experts_of_every_type_are_the_numbers_of_that_type(
    first: int, prompt: list[int], tmp_path: Path
) -> None:
    """Each type is once that of gates, of what they multiply and of outputs; others are next."""
    names = [f"blk.{layer}.{kind}.weight" for layer in range(6) for kind in KINDS]
    types = dict(zip(names, cycle([*TYPES[first:], *TYPES[:first]]), strict=False))
    assert set(types.values()) == set(TYPES)
    oracle = random_model("qwen3moe", num_hidden_layers=6)
    file = file_of(oracle, "qwen3moe", lambda stored: types.get(stored, "F32"))
    path = file.write(tmp_path / "model.gguf")
    check(path, dequantized(oracle, "qwen3moe", file), prompt)


@pytest.mark.parametrize(
    ("name", "kind", "form"),
    [
        ("qwen3moe", "MXFP4", "pack_mxfp4"),
        ("llama", "MXFP4", "pack_mxfp4"),
        ("gpt-oss", "MXFP4", "pack_mxfp4"),
        ("qwen3moe", "Q4_K", "pack_groups"),
        ("gpt-oss", "Q6_K", "pack_groups"),
        ("qwen2moe", "Q4_K", "pack_groups"),
        ("qwen2moe", "MXFP4", "pack_groups"),  # codes need all experts to be apart
    ],
)
def test_experts_stay_in_few_bits_for_the_kernels_of_a_cpu(
    name: str,
    kind: str,
    form: str,
    prompt: list[int],
    packs: Counter[str],
    tmp_path: Path,
) -> None:
    oracle = random_model(name)
    file = file_of(oracle, name, experts_in(kind))
    check(file.write(tmp_path / "model.gguf"), dequantized(oracle, name, file), prompt)
    assert packs[form] == 2 * 2 * (6 if name == "qwen2moe" else 4)  # layers, products and experts


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss", "qwen2moe"])
def test_codes_are_widened_where_no_kernel_reads_them(
    name: str, prompt: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "0")
    oracle = random_model(name)
    file = file_of(oracle, name, experts_in("MXFP4"))
    check(file.write(tmp_path / "model.gguf"), dequantized(oracle, name, file), prompt)


def test_a_layer_with_one_matrix_of_another_type_keeps_no_codes(
    prompt: list[int], packs: Counter[str], tmp_path: Path
) -> None:
    oracle, kinds = random_model("gpt-oss"), experts_in("MXFP4")
    file = file_of(
        oracle,
        "gpt-oss",
        lambda stored: "Q8_0" if stored == "blk.1.ffn_up_exps.weight" else kinds(stored),
    )
    check(file.write(tmp_path / "model.gguf"), dequantized(oracle, "gpt-oss", file), prompt)
    assert packs["pack_mxfp4"] == packs["pack_groups"] == 2 * 4  # of a layer each


class Codes(CodeRows):
    """Codes of a weight, which are filled."""

    @classmethod
    def of(cls, values: Tensor) -> "Codes":
        num_rows, width = values.shape
        empty = torch.empty((num_rows, width // 2), dtype=torch.uint8)
        return cls(empty, torch.empty((num_rows, width // 32), dtype=torch.uint8))


def numbers_of(stored: CodeRows) -> Tensor:
    """The numbers of codes in the order of a checkpoint, where neighbours share a byte."""
    blocks = stored.codes.view(len(stored.codes), -1, 16)
    in_turn = torch.cat((blocks & 15, blocks >> 4), -1)
    pairs = in_turn[..., 0::2] | in_turn[..., 1::2] << 4
    return widened(pairs, stored.exponents, torch.float32)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("qwen3moe", "Q6_K"), ("qwen3moe", "MXFP4"), ("llama", "Q4_0"), ("gpt-oss", "MXFP4")],
)
def test_each_rank_reads_its_share(name: str, kind: str, size: int, tmp_path: Path) -> None:
    model = random_model(name, num_key_value_heads=4)
    path = file_of(model, name, experts_in(kind)).write(tmp_path / "model.gguf")
    stored = stored_weights(read_header(path))
    whole = {tensor: torch.from_numpy(each.dense()) for tensor, each in stored.items()}
    for rank in range(size):
        sharding = Sharding(model_config.load(path), rank, size)
        parts = {tensor: part_of(each, sharding.share(tensor)) for tensor, each in whole.items()}
        filled: dict[str, Any] = {
            tensor: Codes.of(part) if stored[tensor].is_mxfp4 else torch.empty_like(part)
            for tensor, part in parts.items()
        }
        model_parts = Decoder(sharding.whole, torch.float32, CPU, 64, Group(rank, size))
        wanted = {tensor: tuple(to.shape) for tensor, to in model_parts.destinations()}
        assert wanted == {tensor: tuple(part.shape) for tensor, part in parts.items()}
        load_gguf(path, Filling(filled, share=sharding.share), CPU, keeps_integers=False)
        for tensor, part in parts.items():
            found = filled[tensor]
            found = numbers_of(found) if isinstance(found, CodeRows) else found
            assert torch.equal(found, part), (rank, tensor)


def test_integers_become_numbers_in_a_weight_that_has_memory_for_them(tmp_path: Path) -> None:
    """Experts become float numbers on CUDA, whose kernels read no integers."""
    file = file_of(random_model("qwen3moe"), "qwen3moe", experts_in("Q4_K"))
    path = file.write(tmp_path / "model.gguf")
    stored = stored_weights(read_header(path))
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    linear = Linear(torch.empty(stored[name].tensor.shape))
    others = {each: torch.empty(stored[each].tensor.shape) for each in stored if each != name}
    filling = Filling({**others, name: linear.rows(0, linear.shape[0])})
    load_gguf(path, filling, CPU, keeps_integers=True)
    assert torch.equal(linear.weight, torch.from_numpy(stored[name].dense()))


def test_a_scale_that_is_too_large_is_refused_as_codes_and_as_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edited(file: GgufFile) -> GgufFile:
        file.tensors["blk.1.ffn_up_exps.weight"].stored[2, 5, 17] = 253  # a second block's
        return file

    file = edited(file_of(random_model("qwen3moe"), "qwen3moe", experts_in("MXFP4")))
    path = file.write(tmp_path / "model.gguf")
    for kernels in ("1", "0"):
        monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", kernels)
        with pytest.raises(
            ValueError, match=r"^model\.gguf: tensor blk\.1\.ffn_up_exps\.weight: a"
        ):
            startup.load(WorkerConfig(device="cpu", max_model_len=32), path, "float32", "")


def test_transformers_is_given_no_experts_of_a_file(tmp_path: Path) -> None:
    path = file_of(random_model("qwen3moe"), "qwen3moe").write(tmp_path / "model.gguf")
    config = WorkerConfig(device="cpu", max_model_len=32, model_impl="transformers")
    with pytest.raises(UnsupportedModel, match=r"^general\.architecture: experts of a GGUF file"):
        startup.load(config, path, "float32", "")
