"""Loading checkpoints, and each way in which one can be refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from worker_svc.models.stored.weight_files import MissingWeight, WeightError
from worker_svc.models.weights import UnexpectedWeight, WrongShape, load_weights


def save(folder: Path, *files: dict[str, Tensor]) -> None:
    """Writes one file, or several with their index."""
    if len(files) == 1:
        save_file(files[0], folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(files):
        name = f"model-{number}.safetensors"
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_parts_land_in_their_rows_of_a_fused_parameter(tmp_path: Path) -> None:
    gate, up = torch.randn(2, 3, 4)
    save(tmp_path, {"gate": gate, "up": up})
    fused = torch.full((6, 4), torch.nan)
    load_weights(tmp_path, {"gate": fused[:3], "up": fused[3:]})
    assert torch.equal(fused, torch.cat((gate, up)))


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    a, b = torch.randn(2, 3)
    save(tmp_path, {"a": a}, {"b": b})
    save_file({"a": torch.zeros(3)}, tmp_path / "consolidated.safetensors")  # not in the index
    destinations = {"a": torch.empty(3), "b": torch.empty(3)}
    load_weights(tmp_path, destinations)
    assert torch.equal(destinations["a"], a)
    assert torch.equal(destinations["b"], b)


def test_types_are_converted_on_the_way(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.tensor([1.0, 2.5]).half()})
    destination = torch.empty(2, dtype=torch.bfloat16)
    load_weights(tmp_path, {"a": destination})
    assert destination.tolist() == [1.0, 2.5]


def test_a_parameter_without_a_tensor_is_named(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.ones(2)})
    with pytest.raises(MissingWeight, match=r"layers\.1\.q"):
        load_weights(tmp_path, {"a": torch.empty(2), "layers.1.q": torch.empty(2)})


def test_a_tensor_without_a_parameter_is_named(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.ones(2), "a.lora": torch.ones(2)})
    with pytest.raises(UnexpectedWeight, match=r"a\.lora"):
        load_weights(tmp_path, {"a": torch.empty(2)})


@pytest.mark.parametrize("shape", [(3,), (1, 2), (1,), ()])
def test_a_tensor_of_another_shape_is_named_with_both(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    save(tmp_path, {"a": torch.ones(shape)})
    with pytest.raises(WrongShape, match=r"a: has shape .*expected \(2,\)"):
        load_weights(tmp_path, {"a": torch.empty(2)})


def write_index(folder: Path, **files: object) -> None:
    """An index that says in which file each tensor is."""
    index = json.dumps({"weight_map": files})
    (folder / "model.safetensors.index.json").write_text(index)


def test_a_tensor_counts_only_in_the_file_that_the_index_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_file({"a": torch.ones(2), "c": torch.ones(1)}, tmp_path / "0.safetensors")
    save_file({"a": torch.zeros(2), "b": torch.ones(2)}, tmp_path / "1.safetensors")
    write_index(tmp_path, a="0.safetensors", b="1.safetensors")
    destinations = {"a": torch.empty(2), "b": torch.empty(2)}
    load_weights(tmp_path, destinations)
    assert destinations["a"].tolist() == [1, 1]
    assert "0.safetensors: not read, since the index does not name this file for it: c" in (
        caplog.text
    )
    assert "1.safetensors: not read, since the index does not name this file for it: a" in (
        caplog.text
    )


def test_a_tensor_that_a_file_has_and_its_index_does_not_name_is_missing(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "0.safetensors")
    write_index(tmp_path, a="0.safetensors")
    with pytest.raises(MissingWeight, match="b not found"):
        load_weights(tmp_path, {"a": torch.empty(2), "b": torch.empty(2)})


def test_a_tensor_that_the_index_promises_in_vain_is_named_with_the_file(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "0.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "1.safetensors")
    write_index(tmp_path, a="0.safetensors", b="0.safetensors", c="1.safetensors")
    with pytest.raises(MissingWeight, match=r"b not found in .*0\.safetensors, where"):
        load_weights(tmp_path, {"a": torch.empty(2), "b": torch.empty(2)})


@pytest.mark.parametrize(
    "file", ["../out.safetensors", "sub/../../out.safetensors", "OUT", "out.bin", "", 7, None]
)
def test_an_index_names_no_file_outside_of_its_folder(tmp_path: Path, file: object) -> None:
    folder, outside = tmp_path / "model", tmp_path / "out.safetensors"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, outside)
    write_index(folder, a=str(outside) if file == "OUT" else file)
    with pytest.raises(WeightError, match=r"a is in .*, which names no \.safetensors file there"):
        load_weights(folder, {"a": torch.empty(2)})


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 1}', "\xff"])
def test_an_index_that_is_none_is_refused_by_its_name(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index, encoding="latin-1")
    with pytest.raises(WeightError, match=r"index\.json is no index of weights"):
        load_weights(tmp_path, {"a": torch.empty(2)})


def test_one_file_wins_over_a_stale_index_and_its_shards(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.zeros(2)}, {"b": torch.zeros(2)})
    save(tmp_path, {"a": torch.ones(2)})
    destination = torch.empty(2)
    load_weights(tmp_path, {"a": destination})
    assert destination.tolist() == [1, 1]


def test_tensors_to_ignore_are_not_those_that_are_read(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.ones(2)})
    with pytest.raises(UnexpectedWeight, match="ignore_weights: a is read"):
        load_weights(tmp_path, {"a": torch.empty(2)}, ignored=frozenset({"a"}))


def test_computed_tensors_of_old_checkpoints_are_passed_over(tmp_path: Path) -> None:
    old = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save(
        tmp_path,
        {"a": torch.ones(2), old: torch.ones(9), "model.rotary_emb.inv_freq": torch.ones(1)},
    )
    load_weights(tmp_path, {"a": torch.empty(2)})


def test_names_to_ignore_match_exactly(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.ones(2), "lm_head.weight": torch.ones(1)})
    load_weights(tmp_path, {"a": torch.empty(2)}, ignored=frozenset({"lm_head.weight"}))
    with pytest.raises(UnexpectedWeight, match=r"lm_head\.weight"):
        load_weights(tmp_path, {"a": torch.empty(2)}, ignored=frozenset({"head.weight"}))


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"never opened")
    with pytest.raises(MissingWeight, match="safetensors only"):
        load_weights(tmp_path, {})


def test_an_index_that_names_an_absent_file_is_refused(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.ones(2)}, {"b": torch.ones(2)})
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(WeightError, match=r"model-1\.safetensors"):
        load_weights(tmp_path, {"a": torch.empty(2), "b": torch.empty(2)})
