"""Precompilation: finds kernels without a device; a marker lets the next start skip it."""

import dataclasses
import gc
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.pace import patience
from tests.worker_svc.random_models import save_random_model
from worker_svc.config import WorkerConfig
from worker_svc.device.gpu_facts import Gpu, only_kind
from worker_svc.startup import precompile, startup
from worker_svc.startup.kernel_compiler import Forks
from worker_svc.startup.precompile import Job, Precompile

H200 = Gpu("NVIDIA H200", 90)
CONFIG = WorkerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
ROOT = Path(__file__).parents[3]
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
# Prints the names of each job's kernels, whether each had a key when it was found, whether torch's
# compiler was loaded by the first job, and the length of one compiled kernel.
REHEARSE = """
import json, sys
from worker_svc.startup.precompile import Job
from worker_svc.startup.kernel_compiler import rehearse
jobs = []
for job in sys.argv[1:]:
    jobs.append([])
    rehearse(Job.parse(job), lambda one: jobs[-1].append((one, one.kernel.hash)))
    if len(jobs) == 1:
        is_slow = "torch._dynamo" in sys.modules or "sympy" in sys.modules
small = next(one for one, _ in jobs[0] if one.name == "_silu_and_mul_kernel")
names = [[one.name for one, _ in job] for job in jobs]
have_keys = all(key for job in jobs for _, key in job)
print(json.dumps([names, have_keys, is_slow, len(small.compile().asm["cubin"])]))
"""


# Prints, of an FP8 cache's kernels, how many conversions from e4m3 to two halves each one has.
WIDENS = """
import json, sys
from worker_svc.startup.precompile import Job
from worker_svc.startup.kernel_compiler import rehearse
found = {}
rehearse(Job.parse(sys.argv[1]), lambda one: found.setdefault(one.name, one))
names = ("_decode_kernel", "_prefill_kernel", "_norm_rope_write_kv_kernel")
print(json.dumps([found[n].compile().asm["ptx"].count("cvt.rn.f16x2.e4m3x2") for n in names]))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model's folder, with an empty kernel cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


def marks(folder: Path) -> list[str]:
    return [path.name for path in (folder / "cache").glob("pagewire-*")]


def ending(code: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", f"exit({code})"])


def test_every_kernel_of_a_worker_is_found_once_and_compiled_without_a_device(folder):
    environment = {name: value for name, value in os.environ.items() if "TRITON" not in name}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    pair = dataclasses.replace(CONFIG, tensor_parallel_size=2)
    jobs = [Job(folder, "auto", config, H200.arch).dump() for config in (CONFIG, pair)]
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REHEARSE, *jobs],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    (names, names_of_pair), have_keys, is_slow, num_bytes = json.loads(ran.stdout)
    assert have_keys  # made in the order of launches, as the worker makes them
    assert set(names) == {
        "_rms_norm_kernel", "_norm_rope_write_kv_kernel", "_prefill_kernel", "_silu_and_mul_kernel",
        "_row_kernel", "_rows_kernel", "_decode_kernel", "_gather_kernel", "_find_kernel",
        "_survey_kernel", "_list_kernel", "_draw_kernel", "_choose_kernel", "_tiled_linear_kernel",
        "_enter_kernel", "_gather_step_kernel", "_gather_last_kernel", "_penalize_kernel",
        "_restrict_kernel",
    }  # fmt: skip
    # Both small caches and caches beyond 32-bit offsets are rehearsed, with many chunk sizes.
    assert names.count("_prefill_kernel") % 2 == 0
    assert names.count("_choose_kernel") == names.count("_penalize_kernel") == 1
    # Of the model's logits, and of those that rows with more requests change, in float32.
    assert all(names.count(name) == 2 for name in ("_find_kernel", "_draw_kernel"))
    assert len(names) < 60
    assert not is_slow
    # Each rank compiles its own kernels, with and without peer memory.
    assert set(names_of_pair) == {*names, "_all_reduce_kernel", "_all_gather_kernel"}
    assert names_of_pair.count("_all_reduce_kernel") % 2 == 0
    assert num_bytes > 1000
    assert len(list((folder / "cache").rglob("*.cubin"))) == 1


def test_kernels_over_an_fp8_cache_are_rehearsed_and_compiled_for_hopper(folder):
    environment = {name: value for name, value in os.environ.items() if "TRITON" not in name}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    config = dataclasses.replace(CONFIG, kv_cache_dtype="fp8_e4m3")
    job = Job(folder, "auto", config, H200.arch)
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WIDENS, job.dump()],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    decode, prefill, write = json.loads(ran.stdout)
    assert decode > 0 and prefill > 0
    assert write == 0  # bytes are made by integer operations
    plain = Job(folder, "auto", CONFIG, H200.arch)
    assert precompile.key(job, H200) != precompile.key(plain, H200)


def test_a_helper_that_did_its_part_leaves_a_mark_and_the_next_start_needs_none(folder):
    mark = folder / "cache" / f"pagewire-{precompile.key(Job(folder, 'auto', CONFIG, 90), H200)}"
    Precompile(ending(0), mark).wait()
    assert marks(folder) == [mark.name]
    assert precompile.start(CONFIG, folder, found=[H200]) is None


def test_a_helper_that_nobody_waits_for_is_reaped_and_leaves_its_mark(folder):
    child = ending(0)
    pid, mark = child.pid, folder / "cache" / "pagewire-x"
    Precompile(child, mark)
    del child
    gc.collect()  # a child that is not reaped raises a ResourceWarning
    deadline_s = time.monotonic() + patience(30)
    while not mark.exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert mark.exists()
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def test_waiting_twice_is_waiting_once(folder):
    compiling = Precompile(ending(0), folder / "cache" / "pagewire-x")
    compiling.wait()
    compiling.wait()
    assert compiling.stop() == 0


def test_a_model_that_is_loaded_and_run_without_a_life_cycle_waits_for_its_helper(
    folder, monkeypatch
):
    """As in tests and benchmarks: only `load`, then `build_runner`."""
    begun: list[Precompile] = []

    def begin(*_: object) -> Precompile:
        begun.append(Precompile(ending(0), folder / "cache" / "pagewire-x"))
        return begun[0]

    monkeypatch.setattr(startup, "_compiling", begin)
    model_folder = folder / "model"
    save_random_model(model_folder, (Qwen2Config, Qwen2ForCausalLM), SMALL)
    config = WorkerConfig(device="cpu", dtype="float32", max_num_seqs=2, max_model_len=32)
    loaded = startup.load(config, model_folder, "float32", "")
    startup.build_runner(config, loaded, num_blocks=8)
    assert marks(folder) == ["pagewire-x"]
    assert begun[0].stop() == 0


def test_a_helper_that_fails_leaves_no_mark_and_says_so(folder, caplog):
    with caplog.at_level(logging.WARNING):
        Precompile(ending(3), folder / "cache" / "pagewire-x").wait()
    assert marks(folder) == []
    assert "ended with exit code 3: the worker compiles the rest" in caplog.text


def test_a_helper_that_is_stopped_takes_its_forks_along_and_leaves_no_mark(folder):
    code = "import os, time; os.fork(); os.write(1, b'ready;'); time.sleep(3600)"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    )
    assert child.stdout is not None
    with child.stdout as said:
        assert said.read(len("ready;ready;")) == b"ready;ready;"
        stopped_s = time.monotonic()
        assert Precompile(child, folder / "cache" / "pagewire-x").stop() < 0
        assert said.read() == b""  # end of file: both processes have ended
    assert time.monotonic() - stopped_s < patience(30)
    assert marks(folder) == []


def test_the_mark_is_for_one_model_device_type_and_set_of_options(folder):
    def key(dtype="auto", gpu=H200, **changes):
        job = Job(folder, dtype, dataclasses.replace(CONFIG, **changes), gpu.arch)
        return precompile.key(job, gpu)

    same = key()
    assert key(port=1, num_kv_blocks=4000) == same
    other = {key("float16"), key(gpu=Gpu("NVIDIA H100", 90)), key(max_num_seqs=16)}
    other |= {key(max_model_len=256), key(block_size=32), key(max_num_batched_tokens=128)}
    (folder / "config.json").write_text('{"num_hidden_layers": 3}')
    assert len({same, key(), *other}) == 8


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({}, [H200, Gpu("NVIDIA A100", 80)]),
        ({"device": "cpu"}, [H200]),
    ],
    ids=["no GPU", "GPUs of two kinds", "a worker on the CPU"],
)
def test_nothing_is_compiled_ahead_for(folder, changes, found):
    config = dataclasses.replace(CONFIG, **changes)
    assert precompile.start(config, folder, found=found) is None


def test_a_folder_without_a_model_is_left_for_the_load_to_refuse(tmp_path):
    assert precompile.start(CONFIG, tmp_path, found=[H200]) is None


def test_gpus_are_of_one_kind_or_none(folder):
    assert only_kind([H200, H200]) == H200
    assert only_kind([]) is None


def test_a_job_is_read_as_it_was_written(folder):
    job = Job(folder, "float16", CONFIG, 90)
    assert Job.parse(job.dump()) == job


def test_forks_run_at_most_so_many_at_once_and_count_those_that_fail(tmp_path):
    forks = Forks(max_processes=2)

    def work(index: int) -> None:
        running = tmp_path / f"running-{index}"
        running.touch()
        time.sleep(0.02)
        (tmp_path / f"most-{len(list(tmp_path.glob('running-*')))}-{index}").touch()
        running.unlink()
        if index == 3:
            raise ValueError("a kernel that does not compile")

    for index in range(6):
        forks.start(lambda index=index: work(index))
    forks.wait()
    assert (forks.num_started, forks.num_failed) == (6, 1)
    at_once = [int(path.name.split("-")[1]) for path in tmp_path.glob("most-*")]
    assert len(at_once) == 6 and max(at_once) <= 2
    assert not list(tmp_path.glob("most-[3-9]-*"))
