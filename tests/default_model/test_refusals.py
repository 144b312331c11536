"""A file that cannot be converted is an error that names it, and leaves nothing in the cache."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from default_model.folder import materialize
from default_model.source import DefaultModelError, GgufSource
from tests.gguf_files import HEADS, permuted, tiny_file


def test_the_folder_has_every_tensor_in_its_order(tiny: GgufSource, tmp_path: Path) -> None:
    stored = tiny_file().tensors
    written = load_file(materialize(tiny, tmp_path / "cache") / "model.safetensors")
    assert len(written) == len(stored)
    queries = written["model.layers.1.self_attn.q_proj.weight"]
    assert np.array_equal(permuted(queries, HEADS), stored["blk.1.attn_q.weight"].values)
    down = written["model.layers.1.mlp.down_proj.weight"]
    assert np.array_equal(down, stored["blk.1.ffn_down.weight"].values)


@pytest.mark.parametrize("num_bytes", [0, 3, 100, 20_000])
def test_a_truncated_file_is_an_error_that_names_it(
    num_bytes: int, tiny: GgufSource, tmp_path: Path
) -> None:
    tiny.path.write_bytes(tiny.path.read_bytes()[:num_bytes])
    with pytest.raises(DefaultModelError, match=r"Tiny-Instruct\.Q8_0\.gguf"):
        materialize(tiny, tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
