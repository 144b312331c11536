"""What a GGUF file asks for and pagewire does not compute is refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gguf_files import GgufFile, Packed, tiny_file
from worker_svc.models import config as model_config
from worker_svc.models.spec import UnsupportedModel


def told(key: str, value: Any) -> Callable[[GgufFile], None]:
    return lambda file: file.metadata.update({key: value})


def short_norm(file: GgufFile) -> None:
    file.tensors["output_norm.weight"] = Packed(np.ones(8, np.float32), "F32")


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (told("llama.expert_count", 8), r"llama\.expert_used_count is missing"),
        (told("llama.expert_used_count", 2), r"llama\.expert_used_count: this key of config\.json"),
        (told("llama.rope.scaling.type", "longrope"), "rope_scaling: short_factor is missing"),
        (told("llama.rope.dimension_count", 4), "partial_rotary_factor: 0.5 is not supported"),
        (told("llama.attention.value_length", 32), r"llama\.attention\.value_length: 32 is not 8"),
        (told("llama.attention.head_count", 3), "tensor .* has shape"),
        (told("llama.block_count", 1), "tensor blk.1.* is not supported with 1 layers"),
        (told("llama.block_count", 3), "9 tensors are missing, blk.2.attn_k.weight first"),
        (told("llama.block_count", 1 << 30), "1073741824 layers, and 20 tensors in all"),
        (told("llama.context_length", 1 << 30), "llama.context_length: 1073741824 is above"),
        (told("llama.context_length", "long"), "llama.context_length: 'long' is not of type int"),
        (told("llama.vocab_size", 7), "llama.vocab_size: 7, and token_embd.weight has 260 rows"),
        (told("split.count", 3), "split.count: this is one of 3 parts"),
        (told("general.type", "adapter"), "general.type: 'adapter' is not supported"),
        (short_norm, r"tensor output_norm\.weight has shape \(8,\), expected \(32,\)"),
        (lambda file: file.tensors.pop("output_norm.weight"), "output_norm.weight first"),
    ],
)
def test_what_would_change_the_output_is_refused_by_name(
    edit: Callable[[GgufFile], None], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        model_config.load(tiny_file(edit).write(tmp_path / "model.gguf"))


def test_another_architecture_is_refused_with_the_list_of_those_that_are_read(
    tmp_path: Path,
) -> None:
    def edit(file: GgufFile) -> None:
        file.architecture = "phi3"

    with pytest.raises(
        UnsupportedModel,
        match=r"^model\.gguf: general\.architecture: 'phi3' is not .* qwen2, qwen3, .*gemma3$",
    ):
        model_config.load(tiny_file(edit).write(tmp_path / "model.gguf"))


def test_a_key_that_is_ignored_on_request_is_read_as_if_it_were_absent(tmp_path: Path) -> None:
    path = tiny_file(told("llama.a_new_key", 1)).write(tmp_path / "model.gguf")
    config = model_config.load(path, ("llama.a_new_key",))
    assert config == model_config.load(tiny_file().write(tmp_path / "plain.gguf"))


def test_a_window_of_attention_limits_the_length(tmp_path: Path) -> None:
    file = tiny_file(told("llama.attention.sliding_window", 7))
    config = model_config.load(file.write(tmp_path / "model.gguf"))
    with pytest.raises(UnsupportedModel, match="sliding_window: attention over the last 7"):
        config.check_length(8)
