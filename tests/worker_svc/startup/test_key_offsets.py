"""Offsets of an FP8 cache's keys: what they are, that starts agree, and what has none."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.worker_svc.conftest import WORKER_CONFIG
from tests.worker_svc.parallel.test_tensor_parallel import on_ranks
from worker_svc.parallel.group import ALONE
from worker_svc.startup import key_offsets, startup

KINDS = ("fp8_e4m3", "fp8_e5m2")


def started(folder, config, group=ALONE):
    """The model of a worker that has its cache."""
    loaded = startup.load(config, folder, "float32", "", group)
    startup.build_runner(config, loaded, num_blocks=64)
    return loaded.decoder


def test_an_offset_lies_between_the_first_key_and_the_mean_of_the_others_in_four_bits() -> None:
    keys = torch.tensor([[[4.0, 0.1, 0.0]], [[1.0, -0.3, 0.0]], [[3.0, -0.5, 0.0]]])
    assert key_offsets.between(keys).tolist() == [[3.0, pytest.approx(-0.15625), 0.0]]
    assert key_offsets.between(keys[:1])[0, 0] == 4
    keys[1, 0, 1] = torch.nan
    assert key_offsets.between(keys).tolist() == [[3.0, 0.0, 0.0]]


def test_tokens_are_of_the_vocabulary_and_always_the_same() -> None:
    ids = key_offsets.tokens(128, 1000)
    assert ids == key_offsets.tokens(128, 1000)
    assert min(ids) >= 0
    assert max(ids) < 1000
    assert len(set(ids)) > 100


@pytest.mark.parametrize("kind", KINDS)
def test_every_start_has_the_same_and_a_rank_those_of_its_heads(llama_folder, kind) -> None:
    config = replace(WORKER_CONFIG, kv_cache_dtype=kind)
    whole = started(llama_folder, config).key_offsets
    assert whole is not None
    assert whole.count_nonzero() == whole.numel()
    assert torch.equal(whole, started(llama_folder, config).key_offsets)
    parts = on_ranks(2, lambda group: started(llama_folder, config, group).key_offsets)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0.1, atol=0)


def test_a_cache_has_them_in_fp8_alone(llama_folder) -> None:
    assert started(llama_folder, WORKER_CONFIG).key_offsets is None
    model = started(llama_folder, replace(WORKER_CONFIG, kv_cache_dtype="fp8_e4m3"))
    found = model.new_cache(4, 16).of_layer(1).key_offsets
    assert torch.equal(found, model.key_offsets[1])


def test_keys_stay_whole_where_a_checkpoint_has_scales(llama_folder, tmp_path) -> None:
    scales = {
        f"model.layers.{layer}.self_attn.{side}_scale": torch.tensor([0.5])
        for layer in range(2)
        for side in "kv"
    }
    (tmp_path / "config.json").write_bytes((llama_folder / "config.json").read_bytes())
    weights = load_file(llama_folder / "model.safetensors")
    save_file(weights | scales, tmp_path / "model.safetensors")
    config = replace(WORKER_CONFIG, kv_cache_dtype="fp8_e4m3")
    assert started(tmp_path, config).key_offsets is None


def test_a_second_runner_of_a_model_has_the_same_offsets(llama_folder) -> None:
    config = replace(WORKER_CONFIG, kv_cache_dtype="fp8_e4m3")
    loaded = startup.load(config, llama_folder, "float32", "")
    found = []
    for _ in range(2):
        startup.build_runner(config, loaded, num_blocks=64)
        found.append(loaded.decoder.key_offsets)
    assert torch.equal(*found)
