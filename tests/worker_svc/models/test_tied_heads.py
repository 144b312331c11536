"""A head that is the embedding table, by what the checkpoint stores, against transformers."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.worker_svc.conftest import WORKER_CONFIG
from tests.worker_svc.models.test_models import LLAMA, MAX_MODEL_LEN, QWEN2, SHAPE, Steps
from tests.worker_svc.parallel.test_tensor_parallel import on_ranks
from tests.worker_svc.quantized_checkpoints import FORMATS, save_quantized
from tests.worker_svc.random_models import save_random_model
from worker_svc.models import Decoder, load_model
from worker_svc.models.stored import head
from worker_svc.models.stored.weight_files import MissingWeight
from worker_svc.models.weights import WrongShape
from worker_svc.startup import startup

CPU = torch.device("cpu")
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SIZES = SHAPE | {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 2}
PROMPT = torch.arange(30) * 7 % 96
BOTH = "config.json says tie_word_embeddings, but lm_head.weight differs"

Change = Callable[[dict[str, Tensor]], None]


def other_head(tensors: dict[str, Tensor]) -> None:
    """The head that a trainer leaves that has tied nothing: one that has moved away."""
    noise = torch.randn(tensors[TABLE].shape, generator=torch.Generator().manual_seed(3))
    tensors[HEAD] = (tensors[TABLE].float() + 0.1 * noise).to(tensors[TABLE].dtype)


def one_other_number(tensors: dict[str, Tensor]) -> None:
    """The smallest difference, in the last row."""
    tensors[HEAD] = tensors[TABLE].clone()
    tensors[HEAD][-1, -1] += 4


def same_head(tensors: dict[str, Tensor]) -> None:
    tensors[HEAD] = tensors[TABLE].clone()


def head_alone(tensors: dict[str, Tensor]) -> None:
    tensors[HEAD] = tensors.pop(TABLE)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that stores the table alone."""
    folder = tmp_path_factory.mktemp("tied")
    save_random_model(folder, LLAMA, SIZES | {"tie_word_embeddings": True})
    return folder


def changed(
    tied: Path, folder: Path, change: Change, dtype: torch.dtype = torch.float32, shards: int = 1
) -> Path:
    """A copy with other tensors, of a type, in one file or several."""
    folder.mkdir()
    for file in tied.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = {name: t.to(dtype) for name, t in load_file(tied / "model.safetensors").items()}
    change(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    weight_map: dict[str, str] = {}
    for number in range(shards):
        part = {name: tensors[name] for name in sorted(tensors)[number::shards]}
        file = f"model-{number}.safetensors"
        save_file(part, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def logits(model: Decoder) -> Tensor:
    return Steps(model, [PROMPT]).run({0: len(PROMPT)})[0]


@torch.inference_mode()
def expected(folder: Path) -> Tensor:
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return theirs(PROMPT[None]).logits[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("change", "is_kept"),
    [(other_head, True), (one_other_number, True), (same_head, False), (head_alone, False)],
)
def test_what_is_stored_decides_as_in_transformers(
    change: Change,
    is_kept: bool,
    dtype: torch.dtype,
    shards: int,
    tied: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = changed(tied, tmp_path / "model", change, dtype, shards)
    model = load_model(folder, torch.float32, CPU, MAX_MODEL_LEN)
    assert (logits(model) - expected(folder)).abs().max() < 1e-4
    assert model.spec.tie_word_embeddings == (not is_kept)
    assert (BOTH in caplog.text) == is_kept


def test_a_difference_that_the_served_type_does_not_have_is_none(
    tied: Path, tmp_path: Path
) -> None:
    """A head in float32 of a table in bfloat16: they are equal where both are rounded."""

    def widened(tensors: dict[str, Tensor]) -> None:
        tensors[TABLE] = tensors[TABLE].bfloat16()
        tensors[HEAD] = tensors[TABLE].float() * (1 + 2**-12)

    folder = changed(tied, tmp_path / "model", widened)
    for dtype, is_tied in ((torch.float32, False), (torch.bfloat16, True)):
        model = load_model(folder, dtype, CPU, MAX_MODEL_LEN)
        assert model.spec.tie_word_embeddings == is_tied


def test_the_two_are_compared_some_rows_at_a_time(
    tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(head, "ROWS_AT_ONCE", 7)
    folder = changed(tied, tmp_path / "model", one_other_number)
    load_model(folder, torch.float32, CPU, MAX_MODEL_LEN)
    assert "first at row 95 of 96" in caplog.text


def test_neither_tensor_is_named(tied: Path, tmp_path: Path) -> None:
    def without(tensors: dict[str, Tensor]) -> None:
        del tensors[TABLE]

    folder = changed(tied, tmp_path / "model", without)
    with pytest.raises(MissingWeight, match=TABLE):
        load_model(folder, torch.float32, CPU, MAX_MODEL_LEN)


def test_a_head_of_another_shape_is_named(tied: Path, tmp_path: Path) -> None:
    def longer(tensors: dict[str, Tensor]) -> None:
        tensors[HEAD] = torch.zeros(97, 64)

    folder = changed(tied, tmp_path / "model", longer)
    with pytest.raises(WrongShape, match=HEAD):
        load_model(folder, torch.float32, CPU, MAX_MODEL_LEN)


@pytest.mark.parametrize("change", [other_head, same_head, head_alone])
def test_two_ranks_decide_alike(change: Change, tied: Path, tmp_path: Path) -> None:
    folder = changed(tied, tmp_path / "model", change)
    found = on_ranks(
        2, lambda group: logits(load_model(folder, torch.float32, CPU, MAX_MODEL_LEN, group))
    )
    for whole in found:
        assert (whole - expected(folder)).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["gptq", "awq", "packed", "fp8-block", "int8"])
@pytest.mark.parametrize("change", [other_head, head_alone])
def test_quantized_checkpoints_keep_their_heads(
    name: str, change: Change, tied: Path, tmp_path: Path
) -> None:
    plain = changed(tied, tmp_path / "plain", change)
    save_quantized(plain, tmp_path / "quantized", tmp_path / "twin", FORMATS[name])
    model = load_model(tmp_path / "quantized", torch.float32, CPU, MAX_MODEL_LEN)
    assert (logits(model) - expected(tmp_path / "twin")).abs().max() < 2e-4


@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_rounding_at_load_rounds_the_head_that_is_stored(
    name: str, tied: Path, tmp_path: Path
) -> None:
    folder = changed(tied, tmp_path / "model", other_head)
    model = load_model(folder, torch.float32, CPU, MAX_MODEL_LEN, quantization=name)
    near = torch.cosine_similarity(logits(model).flatten(), expected(folder).flatten(), dim=0)
    assert near > 0.9


def test_a_head_in_integers_stays_apart_from_the_table(tmp_path: Path) -> None:
    save_random_model(tmp_path / "tied", QWEN2, SIZES | {"tie_word_embeddings": True})
    folder = tmp_path / "model"
    save_quantized(tmp_path / "tied", folder, tmp_path / "twin", FORMATS["gptq"])
    tensors = load_file(folder / "model.safetensors")
    written, numbers = FORMATS["gptq"].write(2 * tensors[TABLE])
    tensors |= {f"lm_head.{suffix}": part.contiguous() for suffix, part in written.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["lm_head"] = True
    (folder / "config.json").write_text(json.dumps(config))
    twin = changed(
        tmp_path / "twin", tmp_path / "both", lambda tensors: tensors.update({HEAD: numbers})
    )
    model = load_model(folder, torch.float32, CPU, MAX_MODEL_LEN)
    assert (logits(model) - expected(twin)).abs().max() < 5e-4


def test_a_draft_model_keeps_its_head(
    tied: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = changed(tied, tmp_path / "model", other_head)
    config = replace(WORKER_CONFIG, draft_model=folder, max_model_len=MAX_MODEL_LEN)
    with caplog.at_level(logging.INFO):
        loaded = startup.load(config, tied, "float32", "")
    assert loaded.draft is not None
    assert (logits(loaded.draft.decoder) - expected(folder)).abs().max() < 1e-4
    assert (logits(loaded.decoder) - expected(tied)).abs().max() < 1e-4


def test_a_stale_index_beside_one_file_is_told(
    tied: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = changed(tied, tmp_path / "model", other_head, shards=2)
    new = load_file(tied / "model.safetensors")
    save_file(new, folder / "model.safetensors", {"format": "pt"})
    model = load_model(folder, torch.float32, CPU, MAX_MODEL_LEN)
    assert torch.equal(logits(model), logits(load_model(tied, torch.float32, CPU, MAX_MODEL_LEN)))
    assert "model.safetensors is read; model.safetensors.index.json, which names model-0" in (
        caplog.text
    )
    assert (logits(model) - expected(folder)).abs().max() < 1e-4
