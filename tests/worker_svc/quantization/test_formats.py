"""Each format's checkpoint computes what its dequantized twin computes."""

import dataclasses
import logging
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.worker_svc.models.test_models import MAX_MODEL_LEN, Steps
from tests.worker_svc.quantization.conftest import FAMILIES, logits_and_tokens
from tests.worker_svc.quantized_checkpoints import (
    FORMATS,
    compressed_float8,
    packed,
    save_quantized,
)
from worker_svc.models import load_model

CPU = torch.device("cpu")
BOUND = 2e-4  # of logits up to 3: sums of integers and of offsets are added in another order


@pytest.mark.parametrize("name", FORMATS)
def test_logits_and_tokens_are_those_of_the_dequantized_twin(
    name: str, plain: Mapping[str, Path], tmp_path: Path
) -> None:
    family = list(FAMILIES)[list(FORMATS).index(name) % len(FAMILIES)]
    folder, twin = tmp_path / "quantized", tmp_path / "twin"
    save_quantized(plain[family], folder, twin, FORMATS[name])
    found, tokens = logits_and_tokens(load_model(folder, torch.float32, CPU, MAX_MODEL_LEN))
    expected, wanted = logits_and_tokens(load_model(twin, torch.float32, CPU, MAX_MODEL_LEN))
    assert expected.abs().max() > 0.5  # logits near 0 would prove nothing
    assert (found - expected).abs().max() < BOUND
    assert tokens == wanted


def test_layers_that_are_left_out_stay_as_they_are(
    plain: Mapping[str, Path], tmp_path: Path
) -> None:
    """A part of a fused layer too, which then has parts of two kinds."""
    kept = frozenset({"model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"})
    ignore = ["lm_head", "model.layers.0.self_attn.q_proj", r"re:.*layers\.1\.mlp\.down_proj$"]
    for number, form in enumerate((packed(), compressed_float8("channel"))):
        folder, twin = tmp_path / f"quantized-{number}", tmp_path / f"twin-{number}"
        changed = dataclasses.replace(form, kept=kept, config={**form.config, "ignore": ignore})
        save_quantized(plain["llama"], folder, twin, changed)
        assert f"{sorted(kept)[0]}.weight" in load_file(folder / "model.safetensors")
        found = logits_and_tokens(load_model(folder, torch.float32, CPU, MAX_MODEL_LEN))
        wanted = logits_and_tokens(load_model(twin, torch.float32, CPU, MAX_MODEL_LEN))
        assert (found[0] - wanted[0]).abs().max() < BOUND and found[1] == wanted[1]


def test_the_log_says_what_a_load_took_and_what_became_wide(
    plain: Mapping[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "quantized"
    save_quantized(plain["llama"], folder, tmp_path / "twin", FORMATS["gptq-order"])
    with caplog.at_level(logging.INFO):
        load_model(folder, torch.float32, CPU, MAX_MODEL_LEN)
    (loaded,) = re.findall(r"loaded Llama.*", caplog.text)
    assert "gptq, 4 bits, group 16, act-order" in loaded
    assert re.search(r"in \d+\.\d s;.*host memory: \d+ MiB at most, \d+ MiB before", loaded)
    assert "14 weights are kept as float numbers" in caplog.text  # seven in each of two layers


@pytest.mark.parametrize(("name", "least"), [("fp8", 0.99), ("int8", 0.998), ("int4", 0.9)])
def test_rounding_at_load_is_close_to_the_plain_checkpoint(
    name: str, least: float, plain: Mapping[str, Path]
) -> None:
    def logits(quantization: str) -> torch.Tensor:
        model = load_model(
            plain["llama"], torch.float32, CPU, MAX_MODEL_LEN, quantization=quantization
        )
        return logits_and_tokens(model, 1)[0].flatten()

    rounded, exact = logits(name), logits("auto")
    assert not torch.equal(rounded, exact)
    assert torch.cosine_similarity(rounded, exact, dim=0) >= least


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_rounded_rows_are_the_same_in_chunks_and_among_others(
    name: str, plain: Mapping[str, Path]
) -> None:
    """Bit for bit, although rows are rounded: by nothing but themselves."""
    model = load_model(plain["llama"], torch.bfloat16, CPU, MAX_MODEL_LEN, quantization=name)
    prompts = [torch.randint(0, 96, (count,)) for count in (40, 40, 21)]
    prompts[1] = prompts[0]
    steps = Steps(model, prompts)
    (whole,) = steps.run({0: 39})
    parts = [steps.run(some) for some in ({1: 17, 2: 3}, {2: 1, 1: 2}, {1: 20, 2: 15})]
    assert torch.equal(torch.cat([parts[0][0], parts[1][1], parts[2][0]]), whole)
    (alone,), (among, _) = steps.run({0: 1}), steps.run({1: 1, 2: 2})
    assert torch.equal(alone, among)


@pytest.mark.parametrize(("name", "bits"), [("auto", 0), ("int8", 8), ("int4", 8)])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_c_kernels_round_the_head_to_eight_bits(
    family: str, name: str, bits: int, plain: Mapping[str, Path]
) -> None:
    model = load_model(plain[family], torch.float32, CPU, MAX_MODEL_LEN, quantization=name)
    if model._compiled is None:
        pytest.skip("no C compiler")
    head = model._compiled._head.arguments
    assert (head.bits, bool(head.rounds_inputs)) == (bits, bits > 0)
