"""Tensors of a checkpoint that are no part of the model, and what may not be left out."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.worker_svc.models.test_models import MAX_MODEL_LEN
from tests.worker_svc.models.test_tied_heads import HEAD, changed, logits, other_head, tied
from tests.worker_svc.quantized_checkpoints import FORMATS, save_quantized
from worker_svc.models import Decoder, load_model
from worker_svc.models.weights import UnexpectedWeight

__all__ = ["tied"]
CPU = torch.device("cpu")
LEFT_OVER = {  # by trainers
    "v_head.summary.weight": torch.ones(1, 64),
    "v_head.summary.bias": torch.ones(1),
    "score.weight": torch.ones(2, 64),
}
PATTERNS = ("v_head.*", "score.weight")


def add_left_over(tensors: dict[str, Tensor]) -> None:
    tensors |= LEFT_OVER


def load(folder: Path, *patterns: str) -> Decoder:
    return load_model(folder, torch.float32, CPU, MAX_MODEL_LEN, ignored_weights=patterns)


@pytest.mark.parametrize("shards", [1, 2])
def test_what_a_pattern_names_is_not_read(
    shards: int, tied: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = changed(tied, tmp_path / "model", add_left_over, shards=shards)
    assert torch.equal(logits(load(folder, *PATTERNS, "no_such.*")), logits(load(tied)))
    told = "ignore_weights: v_head.*: v_head.summary.bias, v_head.summary.weight is not read"
    assert told in caplog.text
    assert "ignore_weights: no_such.* matches no tensor" in caplog.text


@pytest.mark.parametrize("patterns", [(), ("score.weight",), ("V_head.*",), ("v_head",)])
def test_what_no_pattern_names_is_refused_with_the_option(
    patterns: tuple[str, ...], tied: Path, tmp_path: Path
) -> None:
    folder = changed(tied, tmp_path / "model", add_left_over)
    with pytest.raises(UnexpectedWeight, match=r"v_head\..*--ignore-weights PATTERN"):
        load(folder, *patterns)


@pytest.mark.parametrize("pattern", ["*", "model.layers.1.*", "*.embed_tokens.weight"])
def test_what_the_model_reads_cannot_be_left_out(pattern: str, tied: Path) -> None:
    with pytest.raises(UnexpectedWeight, match=r"ignore_weights: .* is read"):
        load(tied, pattern)


@pytest.mark.parametrize("name", ["gptq", "awq", "fp8-block", "packed"])
def test_quantized_checkpoints_too(name: str, tied: Path, tmp_path: Path) -> None:
    plain = changed(tied, tmp_path / "plain", add_left_over)
    save_quantized(plain, tmp_path / "quantized", tmp_path / "twin", FORMATS[name])
    model = load(tmp_path / "quantized", *PATTERNS)
    assert (logits(model) - logits(load(tmp_path / "twin", *PATTERNS))).abs().max() < 2e-4
    with pytest.raises(UnexpectedWeight, match=r"ignore_weights: .*0\.mlp\.\w+\.\w+ is read"):
        load(tmp_path / "quantized", *PATTERNS, "*.layers.0.mlp.*")


def test_a_head_that_is_left_out_is_the_table_again(tied: Path, tmp_path: Path) -> None:
    folder = changed(tied, tmp_path / "model", other_head)
    assert torch.equal(logits(load(folder, HEAD)), logits(load(tied)))


def test_a_scale_of_the_kv_cache_cannot_be_left_out(tied: Path, tmp_path: Path) -> None:
    scale = "model.layers.0.self_attn.k_scale"
    folder = changed(tied, tmp_path / "model", lambda t: t.update({scale: torch.ones(1)}))
    with pytest.raises(UnexpectedWeight, match=f"ignore_weights: {scale} is read"):
        load(folder, "*.k_scale")


@pytest.mark.parametrize(
    "end", ["rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "masked_bias"]
)
def test_buffers_of_older_trainers_need_no_option(end: str, tied: Path, tmp_path: Path) -> None:
    buffer = {f"model.layers.0.self_attn.{end}": torch.ones(3)}
    folder = changed(tied, tmp_path / "model", lambda tensors: tensors.update(buffer))
    assert torch.equal(logits(load(folder)), logits(load(tied)))
