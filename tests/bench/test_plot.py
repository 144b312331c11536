"""Results of documented become pictures and tables, separate from other engines' results."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench import plot
from bench.harness.bars import BOTTOM, HEIGHT, TOP, Chart, svg
from bench.harness.records import spread

SVG = "{http://www.w3.org/2000/svg}"


def steps(batch: int, step_ms: float) -> dict[str, object]:
    return {
        "benchmark": "steps",
        "shape": "qwen3-0.6b",
        "batch": batch,
        "step_ms": spread([step_ms, step_ms + 0.5, step_ms - 0.5], 3),
        "device_ms": spread([step_ms - 0.01], 3),
        "idle_share": spread([0.0125], 5),
    }


STARTUP = {"benchmark": "startup", "shape": "qwen3-0.6b", "cold_s": 22.1, "warm_s": [8.4, 8.5]}


def write(path: Path, *lines: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_bars_are_as_high_as_their_values_and_a_limit_lies_over_its_group() -> None:
    groups = {"a": {"one": 4.0, "other": 2.0, "floor": 1.0}, "b": {"other": 3.0}}
    root = ElementTree.fromstring(svg(Chart("t", groups, ("one", "other"), "floor", ".1f")))
    bars = [each for each in root.iter(f"{SVG}rect") if each.get("width") != "10"]
    heights = [float(each.attrib["height"]) for each in bars]
    full = HEIGHT - TOP - BOTTOM
    assert heights == pytest.approx([full, full / 2, full * 3 / 4])
    assert [each.get("class") for each in bars] == ["bar0", "bar1", "bar1"]
    _, limit = (each for each in root.iter(f"{SVG}line") if each.get("class") == "limit")
    assert float(limit.attrib["y1"]) == pytest.approx(HEIGHT - BOTTOM - full / 4)
    values = [each.text for each in root.iter(f"{SVG}text") if each.get("class") == "value"]
    assert values == ["4.0", "2.0", "3.0"]


def test_the_last_result_of_each_kind_is_drawn_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = write(tmp_path / "r.jsonl", steps(8, 9.0), steps(1, 0.7), steps(8, 1.0), STARTUP)
    assert plot.main([str(results), "--to", str(tmp_path / "drawn")]) == 0
    told = capsys.readouterr().out
    assert "| Qwen3-0.6B, 1 | 0.700 | 0.700, 1.200, 0.200 | 0.690 | 1.25% | 1,429 |" in told
    assert "| Qwen3-0.6B | 22.1 | 8.4, 8.5 |" in told
    assert "9.000" not in told
    (picture,) = (tmp_path / "drawn").iterdir()
    assert picture.name == "steps-qwen3-0.6b.svg"
    root = ElementTree.fromstring(picture.read_text())
    values = [each.text for each in root.iter(f"{SVG}text") if each.get("class") == "value"]
    assert values[:3] == ["0.70", "1.75", "2.14"]  # ours first, then the others of batch 1


def test_two_gpus_are_not_mistaken_for_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = steps(1, 4.0) | {"shape": "qwen3-8b", "worker": []}
    two = steps(1, 3.0) | {"shape": "qwen3-8b", "worker": ["--tensor-parallel-size", "2"]}
    results = write(tmp_path / "r.jsonl", one, two)
    assert plot.main([str(results), "--to", str(tmp_path / "drawn")]) == 0
    told = capsys.readouterr().out
    assert "| Qwen3-8B, 1 | 4.000 |" in told
    assert "| Qwen3-8B on 2 GPUs, 1 | 3.000 |" in told
    drawn = {each.name: each.read_text() for each in (tmp_path / "drawn").iterdir()}
    assert sorted(drawn) == ["steps-qwen3-8b-x2.svg", "steps-qwen3-8b.svg"]
    assert ">3.00<" in drawn["steps-qwen3-8b-x2.svg"]
    assert ">3.78<" in drawn["steps-qwen3-8b-x2.svg"]  # vLLM's time on two GPUs
    assert ">5.17<" in drawn["steps-qwen3-8b.svg"]


def test_other_grants_and_kernels_are_told_and_not_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_default = steps(256, 5.1) | {"max_grant": None}
    one_by_one = steps(256, 5.0) | {"max_grant": 1}
    kernels = [
        {"benchmark": "kernels", "kernel": kernel, "shape": "8 x 576", "us": us}
        | {"share_of_ceiling": 0.376}
        for kernel, us in (("decode_attention", 11.87), ("prefill_attention", 1145.4))
    ]
    results = write(tmp_path / "r.jsonl", by_default, one_by_one, *kernels)
    assert plot.main([str(results), "--to", str(tmp_path / "drawn")]) == 0
    told = capsys.readouterr().out
    assert "| Qwen3-0.6B, 256 | 5.100 |" in told
    assert "| Qwen3-0.6B, 256, grants of at most 1 | 5.000 |" in told
    assert "| decode_attention, 8 x 576 | 11.9 | 38% |" in told
    assert "| prefill_attention, 8 x 576 | 1145.4 | 38% |" in told
    (picture,) = (tmp_path / "drawn").iterdir()
    assert ">5.10<" in picture.read_text()
    assert ">5.00<" not in picture.read_text()


def test_a_file_without_steps_and_throughput_is_refused(tmp_path: Path) -> None:
    results = write(tmp_path / "r.jsonl", STARTUP)
    with pytest.raises(SystemExit):
        plot.main([str(results), "--to", str(tmp_path)])
