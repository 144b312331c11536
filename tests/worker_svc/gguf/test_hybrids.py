"""A hybrid in a GGUF file computes what transformers computes of the same numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagewire.gguf.header import BadGguf, read_header
from pagewire.gguf.stored import stored_weights
from tests.gguf_experts import HYBRIDS, LFM2S, dequantized, file_of, random_model
from tests.gguf_files import GgufFile, Packed
from tests.worker_svc.gguf.test_models import check, load
from worker_svc.models import config as model_config
from worker_svc.models.sharding import Sharding
from worker_svc.models.spec import UnsupportedModel
from worker_svc.models.stored.gguf import load_gguf
from worker_svc.models.weights import Filling
from worker_svc.transformers_models import config as library
from worker_svc.transformers_models import loading

CPU = torch.device("cpu")
Edit = Callable[[GgufFile], None]


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q6_K"])
@pytest.mark.parametrize("name", HYBRIDS | LFM2S)
def test_logits_are_those_of_transformers(
    name: str, kind: str, prompt: list[int], tmp_path: Path
) -> None:
    oracle = random_model(name)
    file = file_of(oracle, name, lambda stored: kind)
    check(file.write(tmp_path / "model.gguf"), dequantized(oracle, name, file), prompt)


@pytest.mark.parametrize("name", ["qwen35", "lfm2"])
def test_transformers_is_given_the_same_numbers(name: str, tmp_path: Path) -> None:
    oracle = random_model(name)
    path = file_of(oracle, name).write(tmp_path / "model.gguf")
    place = loading.LoadTarget(library.load(path), torch.float32, CPU)
    model, _ = loading.load(path, place)
    expected = dict(oracle.named_parameters())
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, values in found.items():
        torch.testing.assert_close(values, expected[name], rtol=0, atol=1e-6)


def test_layers_that_draft_are_not_read(prompt: list[int], tmp_path: Path) -> None:
    oracle = random_model("qwen35")
    file = file_of(oracle, "qwen35")
    file.metadata |= {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    ones = Packed(np.ones((256, 512), np.float32), "F32")
    file.tensors |= {f"blk.4.{name}.weight": ones for name in ("nextn.eh_proj", "attn_q")}
    check(file.write(tmp_path / "model.gguf"), oracle, prompt)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", HYBRIDS | LFM2S)
def test_each_rank_reads_its_share(name: str, size: int, tmp_path: Path) -> None:
    model = random_model(name, num_key_value_heads=4)
    path = file_of(model, name, lambda stored: "Q6_K").write(tmp_path / "model.gguf")
    stored = stored_weights(read_header(path))
    whole = {tensor: torch.from_numpy(each.dense()) for tensor, each in stored.items()}
    for rank in range(size):
        sharding = Sharding(model_config.load(path), rank, size)
        parts = dict(whole)
        for tensor, values in whole.items():
            if (share := sharding.share(tensor)) is not None:
                parts[tensor] = share.cut(values, values.shape[share.dim] // share.count)
        filled = {tensor: torch.empty_like(part) for tensor, part in parts.items()}
        load_gguf(path, Filling(filled, share=sharding.share), CPU, keeps_integers=False)
        for tensor, part in parts.items():
            assert torch.equal(filled[tensor], part), (rank, tensor)


def told(key: str, value: Any) -> Edit:
    return lambda file: file.metadata.update({f"qwen35.{key}": value})


def without(tensor: str) -> Edit:
    return lambda file: file.tensors.pop(tensor) and None


def shaped(tensor: str, *shape: int) -> Edit:
    values = np.ones(shape, np.float32)
    return lambda file: file.tensors.update({tensor: Packed(values, "F32")})


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (told("ssm.time_step_rank", 10), r"time_step_rank: 10 is no multiple of 4 heads"),
        (told("ssm.inner_size", 770), r"inner_size: 770 is no multiple of 12 heads"),
        (told("ssm.inner_size", 384), r"tensor blk\.0\..* has shape .*, expected"),
        (told("ssm.group_count", 2), r"tensor blk\.0\..* has shape .*, expected"),
        (told("ssm.conv_kernel", 3), r"ssm_conv1d\.weight has shape .*4\), expected .*3\)"),
        (told("full_attention_interval", 0), "full_attention_interval: 0 is outside"),
        (told("full_attention_interval", 4), "tensors are missing, blk.1.attn_gate.weight first"),
        (told("nextn_predict_layers", 4), "nextn_predict_layers: 4 leave no layers"),
        (told("block_count", 1 << 30), "1073741824 layers, and .* tensors in all"),
        (without("blk.2.ssm_a"), r"missing, blk\.2\.ssm_a first"),
        (without("blk.0.ssm_dt.bias"), r"missing, blk\.0\.ssm_dt\.bias first"),
        (shaped("blk.0.ssm_a", 4), r"tensor blk\.0\.ssm_a has shape \(4,\), expected \(12,\)"),
        (shaped("blk.1.attn_q.weight", 256, 256), r"attn_q\.weight has shape \(256, 256\)"),
        (shaped("blk.0.attn_q.weight", 512, 256), "blk.0.attn_q.weight is not supported"),
        (shaped("blk.0.ssm_in.weight", 512, 256), "blk.0.ssm_in.weight is not supported"),
        (told("rope.dimension_count", 7), "7 dimensions of a head are no pairs"),
        (told("ssm.a_new_key", 1), r"qwen35\.ssm\.a_new_key: this key of config\.json"),
    ],
)
def test_what_is_hostile_or_not_computed_is_refused_by_name(
    edit: Edit, said: str, tmp_path: Path
) -> None:
    file = file_of(random_model("qwen35"), "qwen35")
    edit(file)
    with pytest.raises(UnsupportedModel, match=said):
        model_config.load(file.write(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("attention.head_count_kv", 2, "head_count_kv: 2 is not of type memoryview"),
        ("attention.head_count_kv", [0, 2], r"head_count_kv: \[0, 2\]... are no heads of 4 layers"),
        ("attention.head_count_kv", [0, 2, 0, 4], "are no heads of 4 layers"),
        ("attention.head_count_kv", [0, 2, 2, 2], r"blk\.2\..* first"),
        ("attention.head_count_kv", [0.0, 2.0, 0.0, 2.0], "are no heads of 4 layers"),
        ("shortconv.l_cache", 4, r"shortconv\.conv\.weight has shape \(256, 3\), expected .*4\)"),
        ("shortconv.l_cache", 0, r"shortconv\.l_cache: 0 is outside"),
    ],
)
def test_what_would_change_convolutions_is_refused(
    key: str, value: Any, said: str, tmp_path: Path
) -> None:
    file = file_of(random_model("lfm2"), "lfm2")
    file.metadata[f"lfm2.{key}"] = value
    with pytest.raises(UnsupportedModel, match=said):
        model_config.load(file.write(tmp_path / "model.gguf"))


def test_a_state_that_would_grow_is_refused(tmp_path: Path) -> None:
    file = file_of(random_model("qwen35"), "qwen35")
    file.tensors["blk.2.ssm_a"].stored[3] = 0.5
    with pytest.raises(BadGguf, match=r"^model\.gguf: tensor blk\.2\.ssm_a: a rate is no finite"):
        load(file.write(tmp_path / "model.gguf"))


def test_heads_that_cut_groups_of_integers_are_refused(tmp_path: Path) -> None:
    model = random_model("qwen35", linear_value_head_dim=16, linear_num_value_heads=8)
    file = file_of(model, "qwen35", lambda stored: "Q8_0" if "ssm_out" in stored else "F32")
    with pytest.raises(BadGguf, match=r"ssm_out\.weight: heads of 16 columns cut groups of 32"):
        load(file.write(tmp_path / "model.gguf"))
