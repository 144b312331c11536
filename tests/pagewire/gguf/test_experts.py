"""The metadata and tensors of GGUF files with experts, and what is refused of them by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagewire.gguf.files import read_file
from pagewire.gguf.header import BadGguf
from tests.gguf_experts import FAMILIES, file_of, random_model
from tests.gguf_files import GgufFile, Packed

Edit = Callable[[GgufFile], None]
SMALL: dict[str, Any] = {"hidden_size": 32, "head_dim": 8}
UP = "blk.1.ffn_up_exps.weight"


@pytest.fixture(scope="module")
def files() -> dict[str, GgufFile]:
    return {name: file_of(random_model(name, **SMALL), name) for name in FAMILIES}


def config_of(
    files: dict[str, GgufFile], name: str, tmp_path: Path, edit: Edit = lambda file: None
) -> dict[str, Any]:
    """config.json of a file that `edit` has changed."""
    whole = files[name]
    file = GgufFile(name, dict(whole.metadata), dict(whole.tensors))
    edit(file)
    content = read_file(file.write(tmp_path / "model.gguf"), "config.json")
    found: dict[str, Any] = json.loads(content or b"")
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_the_configuration_is_that_of_the_model(
    name: str, files: dict[str, GgufFile], tmp_path: Path
) -> None:
    of_config, of_model, _ = FAMILIES[name]
    found = config_of(files, name, tmp_path)
    assert found["architectures"] == [of_model.__name__]
    ours, theirs = of_config(**found).to_dict(), random_model(name, **SMALL).config.to_dict()
    same = theirs.keys() - {"architectures", "dtype", "initializer_range", "torch_dtype"}
    same -= {"max_window_layers", "sliding_window"} if name.startswith("qwen") else set()
    same -= {"intermediate_size"} if name == "qwen35moe" else set()  # of no layer
    assert {key for key in same if ours.get(key) != theirs[key]} == set()


def test_calls_of_gpt_oss_end_its_output(files: dict[str, GgufFile], tmp_path: Path) -> None:
    """No file says so: of its tokens it names `<|return|>` alone."""
    whole = files["gpt-oss"]
    tokens = list(whole.metadata["tokenizer.ggml.tokens"])
    tokens[5], tokens[9] = "<|call|>", "<|return|>"
    told = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 9}
    file = GgufFile("gpt-oss", whole.metadata | told, whole.tensors)
    path = file.write(tmp_path / "model.gguf")
    content = json.loads(read_file(path, "generation_config.json") or b"")
    assert content["eos_token_id"] == [9, 0, 5]  # 0 is <|endoftext|>


def told(key: str, value: Any) -> Edit:
    return lambda file: file.metadata.update({key: value})


def untold(key: str) -> Edit:
    return lambda file: file.metadata.pop(key) and None


def shaped(tensor: str, *shape: int) -> Edit:
    values = np.ones(shape, np.float32)
    return lambda file: file.tensors.update({tensor: Packed(values, "F32")})


def without(tensor: str) -> Edit:
    return lambda file: file.tensors.pop(tensor) and None


def test_what_a_file_may_say_of_its_router_is_what_the_architecture_does(
    files: dict[str, GgufFile], tmp_path: Path
) -> None:
    plain = config_of(files, "qwen3moe", tmp_path)
    for edit in (
        told("qwen3moe.expert_weights_norm", True),
        told("qwen3moe.expert_gating_func", 1),
    ):
        assert config_of(files, "qwen3moe", tmp_path, edit) == plain


def test_yarn_of_gpt_oss_has_the_limits_that_its_file_says(
    files: dict[str, GgufFile], tmp_path: Path
) -> None:
    key = "gpt-oss.rope.scaling.yarn_beta_fast"
    found = config_of(files, "gpt-oss", tmp_path, told(key, 24.0))
    assert found["rope_scaling"]["beta_fast"] == 24.0
    assert found["rope_scaling"]["truncate"] is False


def test_gpt_oss_is_not_scaled_where_its_file_says_nothing_of_it(
    files: dict[str, GgufFile], tmp_path: Path
) -> None:
    def edit(file: GgufFile) -> None:
        for key in ("type", "factor", "original_context_length"):
            del file.metadata[f"gpt-oss.rope.scaling.{key}"]

    assert config_of(files, "gpt-oss", tmp_path, edit)["rope_scaling"] == {"rope_type": "default"}


@pytest.mark.parametrize(
    ("name", "edit", "said"),
    [
        (
            "qwen3moe",
            told("qwen3moe.expert_count", 8),
            r"tensor blk\.0\.ffn_.* has shape \(4, .*\), expected \(8, ",
        ),
        ("qwen3moe", told("qwen3moe.expert_count", 1 << 30), r"expected \(1073741824, "),
        ("qwen3moe", told("qwen3moe.expert_count", 0), r"qwen3moe\.expert_count: 0 is outside"),
        ("qwen3moe", told("qwen3moe.expert_used_count", 5), "expert_used_count: 5 of 4 experts"),
        ("qwen3moe", untold("qwen3moe.expert_used_count"), "expert_used_count is missing"),
        (
            "qwen3moe",
            untold("qwen3moe.expert_feed_forward_length"),
            "expert_feed_forward_length is missing",
        ),
        (
            "qwen3moe",
            told("qwen3moe.expert_feed_forward_length", 128),
            r"has shape .*256.*, expected .*128",
        ),
        (
            "qwen3moe",
            told("qwen3moe.expert_weights_norm", False),
            r"qwen3moe\.expert_weights_norm: False is not True",
        ),
        ("qwen3moe", told("qwen3moe.expert_gating_func", 2), "expert_gating_func: 2 is not 1"),
        ("qwen3moe", shaped(UP, 256, 32), rf"tensor {UP} has shape \(256, 32\), expected \(4, 2"),
        ("qwen3moe", shaped(UP, 4, 32, 256), rf"tensor {UP} has shape \(4, 32, 256\)"),
        ("qwen3moe", shaped(UP, 3, 256, 32), rf"tensor {UP} has shape \(3, 256, 32\)"),
        ("qwen3moe", without(UP), f"1 tensors are missing, {UP} first"),
        ("qwen3moe", without("blk.0.ffn_gate_inp.weight"), "ffn_gate_inp.weight first"),
        ("qwen3moe", shaped("blk.0.ffn_gate_inp.bias", 4), "ffn_gate_inp.bias is not supported"),
        ("qwen3moe", shaped("blk.0.ffn_up_exps.bias", 4, 256), "ffn_up_exps.bias is not supported"),
        ("qwen3moe", shaped("blk.0.ffn_up.weight", 512, 32), "ffn_up.weight is not supported"),
        (
            "qwen3moe",
            shaped("blk.0.ffn_gate_up_exps.weight", 4, 512, 32),
            "ffn_gate_up_exps.weight is not supported",
        ),
        ("llama", told("llama.expert_weights_norm", False), "False is not True"),
        ("llama", shaped("blk.0.ffn_gate.3.weight", 256, 32), "ffn_gate.3.weight is not supported"),
        ("gpt-oss", without("blk.1.ffn_up_exps.bias"), "missing, blk.1.ffn_up_exps.bias first"),
        ("gpt-oss", without("blk.0.attn_sinks.weight"), "missing, blk.0.attn_sinks.weight first"),
        ("gpt-oss", without("blk.0.attn_output.bias"), "missing, blk.0.attn_output.bias first"),
        ("gpt-oss", shaped("blk.0.attn_sinks.weight", 2), r"attn_sinks\.weight has shape \(2,\)"),
        ("gpt-oss", shaped("blk.0.ffn_up_exps.bias", 4, 8), r"ffn_up_exps\.bias has shape \(4, 8"),
        (
            "gpt-oss",
            untold("gpt-oss.attention.sliding_window"),
            "attention.sliding_window is missing",
        ),
        (
            "gpt-oss",
            told("gpt-oss.rope.scaling.yarn_attn_factor", 2.0),
            "yarn_attn_factor: only 1 is supported",
        ),
    ],
)
def test_what_is_hostile_or_not_computed_is_refused_by_name(
    name: str, edit: Edit, said: str, files: dict[str, GgufFile], tmp_path: Path
) -> None:
    with pytest.raises(BadGguf, match=rf"^model\.gguf: .*{said}"):
        config_of(files, name, tmp_path, edit)


def test_a_file_that_ends_within_its_experts_is_refused(
    files: dict[str, GgufFile], tmp_path: Path
) -> None:
    whole = files["qwen3moe"]
    last = dict(whole.tensors)
    last[UP] = last.pop(UP)
    path = GgufFile("qwen3moe", whole.metadata, last).write(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(BadGguf, match=rf"^model\.gguf: tensor {UP}: .*cut off or damaged"):
        read_file(path, "config.json")
