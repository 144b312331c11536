"""Names, order and refusals of the GGUF reader, with a model of a few kilobytes."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from safetensors.numpy import load_file

from default_model import llama
from default_model.folder import materialize
from default_model.source import DefaultModelError, GgufSource


def permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """GGUF's row order of a Hugging Face projection: rows of the two halves alternate."""
    head_dim = len(rows) // num_heads
    order = [
        head * head_dim + half * head_dim // 2 + pair
        for head in range(num_heads)
        for pair in range(head_dim // 2)
        for half in (0, 1)
    ]
    return rows[order]


@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 2), (3, 4), (9, 64)])
def test_unpermute_undoes_what_gguf_does_to_the_rows(num_heads: int, head_dim: int) -> None:
    rows = np.arange(num_heads * head_dim * 3, dtype=np.float32).reshape(-1, 3)
    assert np.array_equal(llama.unpermute(permute(rows, num_heads), num_heads), rows)


def test_only_queries_and_keys_change_their_order(tiny: GgufSource, tmp_path: Path) -> None:
    stored = {t.name: t for t in GGUFReader(tiny.path).tensors}
    written = load_file(materialize(tiny, tmp_path / "cache") / "model.safetensors")
    assert len(written) == len(stored)
    for name, num_heads in (("q", 4), ("k", 2)):
        ours = written[f"model.layers.1.self_attn.{name}_proj.weight"]
        theirs = stored[f"blk.1.attn_{name}.weight"].data
        assert np.array_equal(permute(ours, num_heads), theirs)
        assert not np.array_equal(ours, theirs)
    value = written["model.layers.1.self_attn.v_proj.weight"]
    assert np.array_equal(value, stored["blk.1.attn_v.weight"].data)


def test_a_small_model_has_the_configuration_it_was_written_with(
    tiny: GgufSource, tmp_path: Path
) -> None:
    config = json.loads((materialize(tiny, tmp_path / "cache") / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 10000.0
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)
    assert (config["head_dim"], config["hidden_size"], config["vocab_size"]) == (8, 32, 260)
    assert config["tie_word_embeddings"] is True


def test_an_output_tensor_unties_the_embedding(
    write_gguf: Callable[..., GgufSource], tmp_path: Path
) -> None:
    head = np.ones((260, 32), dtype=np.float32)
    untied = write_gguf(lambda writer: writer.add_tensor("output.weight", head))
    folder = materialize(untied, tmp_path / "cache")
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    assert np.array_equal(load_file(folder / "model.safetensors")["lm_head.weight"], head)


def scaled_rope(writer: GGUFWriter) -> None:
    writer.add_string("llama.rope.scaling.type", "yarn")


def bias(writer: GGUFWriter) -> None:
    writer.add_tensor("blk.0.attn_q.bias", np.zeros(32, dtype=np.float32))


def third_layer(writer: GGUFWriter) -> None:
    writer.kv_data[0].pop("llama.block_count")
    writer.add_block_count(3)


def other_splitting(writer: GGUFWriter) -> None:
    writer.kv_data[0].pop("tokenizer.ggml.pre")
    writer.add_tokenizer_pre("llama-bpe")


def half_rotated(writer: GGUFWriter) -> None:
    writer.kv_data[0].pop("llama.rope.dimension_count")
    writer.add_rope_dimension_count(4)


def no_template(writer: GGUFWriter) -> None:
    writer.kv_data[0].pop("tokenizer.chat_template")


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (scaled_rope, "llama.rope.scaling.type"),
        (bias, "blk.0.attn_q.bias"),
        (third_layer, "blk.2."),
        (other_splitting, "tokenizer.ggml.pre 'llama-bpe'"),
        (half_rotated, "llama.rope.dimension_count 4"),
        (no_template, "tokenizer.chat_template"),
    ],
)
def test_what_the_folder_could_not_express_is_refused_by_name(
    edit: Callable[[GGUFWriter], None],
    named: str,
    write_gguf: Callable[..., GgufSource],
    tmp_path: Path,
) -> None:
    gguf = write_gguf(edit)
    with pytest.raises(DefaultModelError, match=named):
        materialize(gguf, tmp_path / "cache")
    assert not [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]


def test_another_architecture_is_refused_by_name(
    write_gguf: Callable[..., GgufSource], tmp_path: Path
) -> None:
    with pytest.raises(DefaultModelError, match=r"general\.architecture 'mamba'"):
        materialize(write_gguf(architecture="mamba"), tmp_path / "cache")


@pytest.mark.parametrize("num_bytes", [0, 3, 100, 20_000])
def test_a_truncated_file_is_an_error_that_names_it(
    num_bytes: int, tiny: GgufSource, tmp_path: Path
) -> None:
    tiny.path.write_bytes(tiny.path.read_bytes()[:num_bytes])
    with pytest.raises(DefaultModelError, match=r"Tiny-Instruct\.Q8_0\.gguf"):
        materialize(tiny, tmp_path / "cache")
