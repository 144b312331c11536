"""A file that cannot be converted is an error that names it, and leaves nothing in the cache."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from default_model.folder import materialize
from default_model.source import DefaultModelError, GgufSource
from tests.gguf_files import (
    HEADS,
    HIDDEN,
    KV_HEADS,
    NUM_TOKENS,
    TINY,
    Packed,
    permuted,
    tiny_file,
)


def test_the_folder_has_every_tensor_in_its_order(tiny: GgufSource, tmp_path: Path) -> None:
    stored = tiny_file().tensors
    written = load_file(materialize(tiny, tmp_path / "cache") / "model.safetensors")
    assert len(written) == len(stored)
    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        ours = written[f"model.layers.1.self_attn.{name}_proj.weight"]
        theirs = stored[f"blk.1.attn_{name}.weight"].values
        assert np.array_equal(permuted(ours, heads), theirs)
        assert not np.array_equal(ours, theirs)
    for name, theirs in (("self_attn.v_proj", "attn_v"), ("mlp.down_proj", "ffn_down")):
        ours = written[f"model.layers.1.{name}.weight"]
        assert np.array_equal(ours, stored[f"blk.1.{theirs}.weight"].values)


def test_a_small_model_has_the_configuration_it_was_written_with(
    tiny: GgufSource, tmp_path: Path
) -> None:
    config = json.loads((materialize(tiny, tmp_path / "cache") / "config.json").read_text())
    expected = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    assert config | TINY | expected == config


def test_an_output_tensor_unties_the_embedding(tmp_path: Path) -> None:
    head = Packed(np.ones((NUM_TOKENS, HIDDEN), np.float32), "F32")
    file = tiny_file(lambda file: file.tensors.update({"output.weight": head}))
    untied = GgufSource(file.write(tmp_path / "untied.gguf"), "untied-1.0")
    folder = materialize(untied, tmp_path / "cache")
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    assert np.array_equal(load_file(folder / "model.safetensors")["lm_head.weight"], head.stored)


@pytest.mark.parametrize("num_bytes", [0, 3, 100, 20_000])
def test_a_truncated_file_is_an_error_that_names_it(
    num_bytes: int, tiny: GgufSource, tmp_path: Path
) -> None:
    tiny.path.write_bytes(tiny.path.read_bytes()[:num_bytes])
    with pytest.raises(DefaultModelError, match=r"Tiny-Instruct\.Q8_0\.gguf"):
        materialize(tiny, tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
