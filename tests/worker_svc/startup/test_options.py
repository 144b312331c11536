"""Options that contradict each other, or have no effect on the device: refused by name."""

from pathlib import Path

import pytest
import torch

from worker_svc import __main__ as program
from worker_svc.config import (
    KV_CACHE_DTYPES,
    UnsupportedOption,
    WorkerConfig,
    parse,
    require_device,
)
from worker_svc.device.device import kv_dtype_name, resolve_kv_dtype
from worker_svc.startup import startup


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--device", "cuda", "--kv-cache-gib", "2"], "kv_cache_gib: 2.0 needs device cpu"),
        (
            ["--device", "cpu", "--gpu-memory-utilization", "0.9"],
            "gpu_memory_utilization: 0.9 needs device cuda",
        ),
        (["--device", "cpu", "--gemm-algorithms", "torch"], "gemm_algorithms: torch needs"),
        (["--device", "cpu", "--attention-backend", "triton"], "attention_backend: triton needs"),
        (["--num-kv-blocks", "1"], "num_kv_blocks: 1 must be 2 or more"),
        (["--num-kv-blocks", "9", "--max-model-len", "129"], "num_kv_blocks: 9 must be 10 or"),
        (["--num-kv-blocks", "9", "--kv-cache-gib", "2"], "kv_cache_gib: 2.0 must be left out"),
        (
            ["--num-kv-blocks", "9", "--gpu-memory-utilization", "0.5"],
            "gpu_memory_utilization: 0.5 must be left out",
        ),
        (
            ["--max-num-seqs", "64", "--max-num-batched-tokens", "32"],
            "max_num_batched_tokens: 32 must be at least max_num_seqs (64)",
        ),
        (["--kv-cache-gib", "nan"], "kv_cache_gib: nan must be"),
        (["--kv-cache-dtype", "int8"], "argument --kv-cache-dtype: invalid choice: 'int8'"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused_by_name(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "device", "refused"),
    [
        ({"kv_cache_gib": 2.0}, "cpu", False),
        ({"kv_cache_gib": 2.0}, "cuda", True),
        ({"gpu_memory_utilization": 0.9}, "cuda", False),
        ({"gpu_memory_utilization": 0.9}, "cpu", True),
        ({}, "cpu", False),
        ({}, "cuda", False),
    ],
)
def test_the_device_that_is_found_decides_for_device_auto(
    option: dict[str, float], device: str, refused: bool
) -> None:
    config = WorkerConfig(**option)  # type: ignore[arg-type]
    if not refused:
        require_device(config, device)
        return
    with pytest.raises(UnsupportedOption, match=f"^{next(iter(option))}: .* this is {device}"):
        require_device(config, device)


def test_a_worker_that_finds_no_gpu_refuses_the_share_of_its_memory(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedOption, match=r"^gpu_memory_utilization: 0.5 needs device cuda"):
        startup.load(WorkerConfig(gpu_memory_utilization=0.5), llama_folder, "float32", "")


def test_a_file_in_place_of_a_model_folder_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "x.safetensors"
    model.touch()
    with pytest.raises(SystemExit) as ended:
        program.main(["--model", str(model)])
    assert ended.value.code == 2
    assert f"--model: {model} is " in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("sizes", [(0, 32), (0, 1), (2000, 0), (20_000, 0), (0, 0), (8, 32)])
def test_a_step_has_room_for_a_token_of_each_sequence(kind: str, sizes: tuple[int, int]) -> None:
    config = WorkerConfig(max_num_seqs=sizes[0], max_num_batched_tokens=sizes[1])
    limits = startup.shape_limits(config, kind, max_model_len=64, vocab_size=32)
    assert limits.max_num_seqs <= limits.max_num_batched_tokens
    assert limits.max_num_seqs == sizes[0] or not sizes[0]
    assert limits.max_num_batched_tokens == sizes[1] or not sizes[1]


def test_ignored_keys_are_a_list_of_names() -> None:
    assert parse(["--ignore-config-keys", "a, b"]).ignore_config_keys == ("a", "b")
    assert parse([]).ignore_config_keys == ()
    words = ["--ignore-weights", "v_head.*", "--ignore-weights=score.weight"]
    assert parse(words).ignore_weights == ("v_head.*", "score.weight")
    assert parse([]).ignore_weights == ()


def test_the_kv_cache_is_of_the_models_type_or_of_the_one_that_is_named() -> None:
    found = [kv_dtype_name(resolve_kv_dtype(name, torch.bfloat16)) for name in KV_CACHE_DTYPES]
    assert found == ["bfloat16", "fp8_e4m3", "fp8_e4m3", "fp8_e5m2"]
    with pytest.raises(ValueError, match="kv_cache_dtype: fp4 must be one of auto, fp8, fp8_e4m3"):
        WorkerConfig(kv_cache_dtype="fp4")


@pytest.mark.parametrize(
    ("name", "capability", "refused"),
    [
        ("auto", (7, 0), False),
        ("fp8", (8, 0), True),
        ("fp8_e4m3", (8, 9), False),
        ("fp8_e5m2", (7, 5), True),
        ("fp8_e5m2", (8, 0), False),
        ("fp8_e4m3", (12, 0), False),
    ],
)
def test_a_device_without_conversions_is_refused_with_its_number(
    name: str, capability: tuple[int, int], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    cuda = torch.device("cuda")
    if not refused:
        resolve_kv_dtype(name, torch.bfloat16, cuda)
        return
    with pytest.raises(UnsupportedOption, match=f"kv_cache_dtype: {name} needs compute"):
        resolve_kv_dtype(name, torch.bfloat16, cuda)
