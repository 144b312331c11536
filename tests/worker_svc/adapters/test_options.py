"""--lora-modules in both forms, the limits, and what cannot have adapters."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.worker_svc.conftest import WORKER_CONFIG, serving
from worker_svc.adapters.options import AdapterModule
from worker_svc.adapters.store import AdapterLimits
from worker_svc.config import UnsupportedOption, WorkerConfig, parse
from worker_svc.startup import adapters


def test_both_forms_and_several_words() -> None:
    told = '{"name": "c", "path": "/x/c=d", "base_model_name": "m"}'
    config = parse(["--lora-modules", "a=/x/a", "b=/x/b=1", "--lora-modules", told])
    assert config.lora_modules == (
        AdapterModule("a", "/x/a"),
        AdapterModule("b", "/x/b=1"),
        AdapterModule("c", "/x/c=d"),
    )


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        (["a"], "'a' is not NAME=PATH"),
        (["=x"], "the name '' is empty"),
        (["a="], "'a' has no path"),
        (["a=x", "a=y"], "two are named 'a'"),
        (["{"], "cannot be read as JSON"),
        (['{"name": "a"}'], "needs a name and a path"),
        (['{"name": "a", "path": "x", "rank": 1}'], "'rank' is not supported"),
        (["a" * 201 + "=x"], "is longer than 200 bytes"),
    ],
)
def test_what_is_no_module(
    texts: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["--lora-modules", *texts])
    assert problem in capsys.readouterr().err


def test_limits_follow_one_another() -> None:
    one = (AdapterModule("a", "x"),)
    assert adapters.limits_of(WorkerConfig()) is None
    assert adapters.limits_of(WorkerConfig(lora_modules=one)) == AdapterLimits(8, 16, 32)
    assert adapters.limits_of(WorkerConfig(max_loras=64)) == AdapterLimits(64, 16, 64)
    config = WorkerConfig(max_loras=2, max_lora_rank=256, max_cpu_loras=5)
    assert adapters.limits_of(config) == AdapterLimits(2, 256, 5)
    with pytest.raises(UnsupportedOption, match="max_cpu_loras: 5 is below max_loras, 8"):
        adapters.limits_of(replace(config, max_loras=0, max_cpu_loras=5, lora_modules=one))
    with pytest.raises(ValueError, match="max_lora_rank: 513 must be 1 to 512"):
        WorkerConfig(max_lora_rank=513)


def test_ranks_on_cuda_and_other_implementations_are_refused_by_the_option(
    llama_folder: Path,
) -> None:
    two = WorkerConfig(max_loras=1, tensor_parallel_size=2)
    with pytest.raises(UnsupportedOption, match="adapters on cuda need tensor_parallel_size 1"):
        adapters.require_adaptable(two, "cuda")
    adapters.require_adaptable(two, "cpu")
    adapters.require_adaptable(replace(two, max_loras=0), "cuda")
    adapters.require_adaptable(replace(two, tensor_parallel_size=1), "cuda")
    config = replace(WORKER_CONFIG, max_loras=1, model_impl="transformers")
    with (
        pytest.raises(UnsupportedOption, match="max_loras: adapters need layers of pagewire"),
        serving(config, llama_folder),
    ):
        pass


def test_a_bad_module_ends_the_start(llama_folder: Path, tmp_path: Path) -> None:
    module = AdapterModule("ghost", str(tmp_path / "nowhere"))
    config = replace(WORKER_CONFIG, lora_modules=(module,))
    with (
        pytest.raises(UnsupportedOption, match=r"lora_modules: ghost: .*nowhere is no folder"),
        serving(config, llama_folder),
    ):
        pass
