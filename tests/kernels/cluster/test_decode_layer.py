"""Layers that the kernels of one row can run; a decoder uses them for one row alone."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.cluster import program
from kernels.cluster.decode_layer import SOURCE, LayerShape, LayerTiling, why_unsuitable
from worker_svc.models.fused import FusedDecoder

SMALL = LayerShape(1024, 3072, 16, 8, 128, has_qk_norm=True)


@pytest.mark.parametrize(
    "shape",
    [
        SMALL,
        LayerShape(576, 1536, 9, 3, 64, has_qk_norm=False),
        LayerShape(960, 2560, 15, 5, 64, has_qk_norm=False),
    ],
)
def test_small_models_suit(shape: LayerShape) -> None:
    assert why_unsuitable(shape, LayerTiling()) == ""


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"num_heads": 15}, "heads 15/8 of 128"),
        ({"head_dim": 96}, "heads 16/8 of 96"),
        ({"num_heads": 72}, "heads 72/8 of 128"),
        ({"hidden": 1000}, "heads 16/8"),
        ({"intermediate": 3080}, "3080 inner values"),
        ({"hidden": 4096}, "takes"),
        ({"intermediate": 12_288}, "tiles of rows"),
    ],
)
def test_others_are_refused_with_the_reason(changed: dict[str, Any], reason: str) -> None:
    assert reason in why_unsuitable(replace(SMALL, **changed), LayerTiling())


def test_all_sources_are_found_next_to_each_other() -> None:
    texts = sorted(SOURCE.parent.glob("*.cu*"))
    included = {
        line.split('"')[1]
        for path in texts
        for line in path.read_text().splitlines()
        if line.startswith("#include")
    }
    assert included == {path.name for path in texts if path.suffix == ".cuh"}
    assert all(len(path.read_text().splitlines()) <= 400 for path in texts)


def test_without_the_bindings_the_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    with pytest.raises(program.CannotCompile, match=r"cuda\.bindings"):
        program.Program(Path("missing.cu"), {})


def test_what_is_kept_is_used_until_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, kept = tmp_path / "kernel.cu", tmp_path / "kept"
    source.write_text("// one")
    compiled: list[str] = []

    def compile_(wanted: program.CudaSource) -> bytes:
        compiled.append(wanted.path.read_text() + " ".join(wanted.options))
        return compiled[-1].encode()

    monkeypatch.setattr(program, "_compiled", compile_)

    def image(size: int, capability: tuple[int, int] = (9, 0)) -> bytes:
        return program._image(program.CudaSource.of(source, {"SIZE": size}, capability), kept)

    assert image(1) == image(1)
    assert len(compiled) == 1
    image(2)
    image(1, (10, 0))
    (tmp_path / "part.cuh").write_text("// a header")
    image(1)
    source.write_text("// two")
    assert b"// two" in image(1)
    assert len(compiled) == 5


def test_a_folder_that_cannot_be_written_costs_the_next_start_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, blocked = tmp_path / "kernel.cu", tmp_path / "file"
    source.write_text("// one")
    blocked.write_text("not a folder")
    monkeypatch.setattr(program, "_compiled", lambda _: b"image")
    assert program._image(program.CudaSource.of(source, {}, (9, 0)), blocked / "kept") == b"image"


def test_one_decoded_row_takes_them_and_nothing_else_does() -> None:
    asked = []

    class OneRow:
        def forward(self, residual: Any, *_: Any) -> str:
            asked.append(residual)
            return "by clusters"

    decoder: Any = FusedDecoder.__new__(FusedDecoder)
    decoder.one_row = OneRow()
    decoder._embedding = lambda ids: ids
    decoder._embed = lambda _: "hidden"
    decoder._layers = [None]
    decoder._layer = lambda *_: "hidden"
    decoder._normed = lambda _: "kernel by kernel"
    decode, prompt = SimpleNamespace(is_decode=True), SimpleNamespace(is_decode=False)

    def forward(num_rows: int, batch: Any) -> Any:
        ids = torch.zeros(num_rows, dtype=torch.int64)
        return decoder.forward(ids, ids, None, batch)

    assert forward(1, decode) == "by clusters"
    assert forward(2, decode) == forward(1, prompt) == "kernel by kernel"
    assert len(asked) == 1
    assert decoder.with_one_row(None).forward(torch.zeros(1), None, None, decode) != "by clusters"
