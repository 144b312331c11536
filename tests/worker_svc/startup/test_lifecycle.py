"""Phases over gRPC and as a process: order, refusals, descriptions, exit codes."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.v1 import worker_pb2
from scheduler_svc.config import parse as parse_scheduler_options
from scheduler_svc.core_config import core_config
from tests.e2e.forks import warm
from tests.pace import paced, patience
from tests.worker_svc.conftest import TIMEOUT_S, WORKER_CONFIG, Attachment, Worker, make_sequence
from worker_svc.config import WorkerConfig, parse

REPOSITORY = Path(__file__).parents[3]
StartWorker = Callable[[WorkerConfig], Worker]


def load(worker: Worker, folder: Path | str, **fields: str) -> worker_pb2.LoadModelResponse:
    request = worker_pb2.LoadModelRequest(path=str(folder), **fields)
    return worker.unary("LoadModel", request, worker_pb2.LoadModelResponse)


def initialize_cache(worker: Worker, num_blocks: int) -> int:
    request = worker_pb2.InitializeCacheRequest(num_blocks=num_blocks)
    response = worker.unary("InitializeCache", request, worker_pb2.InitializeCacheResponse)
    return response.num_blocks


def warm_up(worker: Worker) -> worker_pb2.WorkerDescription:
    response = worker.unary("WarmUp", worker_pb2.WarmUpRequest(), worker_pb2.WarmUpResponse)
    return response.description


def health(channel: grpc.Channel, name: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S).status


def refused(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as error:
        call()
    return error.value.code(), error.value.details()


def test_a_ready_worker_tells_what_its_rehearsal_took_and_limits_steps_by_it(
    start_worker: StartWorker, llama_folder: Path
) -> None:
    worker = start_worker(WORKER_CONFIG)
    load(worker, llama_folder, dtype="float32")
    initialize_cache(worker, 20)
    assert not worker.describe().description.rehearsed_steps
    rehearsed = {s.num_tokens: s.seconds for s in warm_up(worker).rehearsed_steps}
    assert set(rehearsed) == {1, WORKER_CONFIG.max_num_seqs, WORKER_CONFIG.max_num_batched_tokens}
    assert min(rehearsed.values()) > 0
    pace = worker.server._step_limit._pace
    assert {size: pace.expected_s(size) for size in rehearsed} == rehearsed


def test_phases_are_entered_in_order_and_health_follows(
    start_worker: StartWorker, llama_folder: Path
) -> None:
    worker = start_worker(WORKER_CONFIG)
    names = ("", "pagewire.v1.WorkerService")
    assert worker.describe().phase == worker_pb2.WORKER_PHASE_STARTED
    model = load(worker, llama_folder, dtype="float32", served_model_name="tiny").model
    assert (model.model, model.dtype) == ("tiny", "float32")
    assert worker.describe().phase == worker_pb2.WORKER_PHASE_LOADED
    assert not worker.describe().HasField("description")
    assert initialize_cache(worker, 20) == 20
    assert worker.describe().phase == worker_pb2.WORKER_PHASE_CACHE_READY
    assert worker.describe().description.num_blocks == 20
    not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
    assert [health(worker.channel, name) for name in names] == [not_serving] * 2
    description = warm_up(worker)
    assert worker.describe().description == description
    serving = health_pb2.HealthCheckResponse.SERVING
    assert [health(worker.channel, name) for name in names] == [serving] * 2


def test_calls_out_of_order_are_failed_preconditions_naming_the_phase(
    start_worker: StartWorker, llama_folder: Path
) -> None:
    worker = start_worker(WORKER_CONFIG)
    steps = [
        lambda: load(worker, llama_folder, dtype="float32"),
        lambda: initialize_cache(worker, 20),
        lambda: warm_up(worker),
    ]
    for position, phase in enumerate(("STARTED", "LOADED", "CACHE_READY", "READY")):
        for other, step in enumerate(steps):
            if other != position:
                code, details = refused(step)
                assert code is grpc.StatusCode.FAILED_PRECONDITION
                assert details.endswith(f"the worker is {phase}")
        if phase != "READY":
            attachment = Attachment(worker.channel, epoch=5)
            assert attachment.status() is grpc.StatusCode.FAILED_PRECONDITION
            steps[position]()
    # A refused attachment does not use up its epoch.
    assert worker.describe().epoch == 0


def test_a_folder_that_is_no_model_is_refused_and_another_can_be_loaded(
    start_worker: StartWorker, llama_folder: Path, tmp_path: Path
) -> None:
    worker = start_worker(WORKER_CONFIG)
    code, details = refused(lambda: load(worker, tmp_path / "nowhere"))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "nowhere" in details
    assert refused(lambda: load(worker, ""))[1].startswith("path")
    assert refused(lambda: load(worker, llama_folder, dtype="int4"))[1].startswith("dtype")
    config = json.loads((llama_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Mamba"]}))
    code, details = refused(lambda: load(worker, tmp_path))
    assert (code, "Mamba" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    assert worker.describe().phase == worker_pb2.WORKER_PHASE_STARTED
    assert load(worker, llama_folder).model.model == llama_folder.name


def test_a_cache_that_cannot_hold_one_sequence_is_refused_with_the_numbers(
    start_worker: StartWorker, llama_folder: Path
) -> None:
    worker = start_worker(WORKER_CONFIG)
    load(worker, llama_folder)
    code, details = refused(lambda: initialize_cache(worker, 12))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "num_blocks 12 leaves 11 KV blocks" in details
    assert "max_model_len 192 needs 12" in details
    assert initialize_cache(worker, 13) == 13


def test_a_length_above_the_models_own_is_refused(
    start_worker: StartWorker, llama_folder: Path
) -> None:
    worker = start_worker(replace(WORKER_CONFIG, max_model_len=257))
    code, details = refused(lambda: load(worker, llama_folder))
    assert (code, "257" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)


def test_the_default_cache_is_what_the_slots_can_use(
    start_worker: StartWorker, llama_folder: Path
) -> None:
    worker = start_worker(replace(WORKER_CONFIG, num_kv_blocks=0))
    load(worker, llama_folder)
    assert initialize_cache(worker, 0) == 1 + 4 * 12


def test_a_cache_size_in_gib_is_taken_at_its_word(
    start_worker: StartWorker, llama_folder: Path
) -> None:
    block_bytes = 2 * 2 * 16 * 2 * 16 * 4
    gib = 77.5 * block_bytes / (1 << 30)
    worker = start_worker(replace(WORKER_CONFIG, num_kv_blocks=0, kv_cache_gib=gib))
    load(worker, llama_folder, dtype="float32")
    assert initialize_cache(worker, 0) == 77


def test_hashes_are_of_the_files(
    start_worker: StartWorker, llama_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llama_folder, folder)
    (folder / "tokenizer.json").write_bytes(b"abc")
    worker = start_worker(WORKER_CONFIG)
    model = load(worker, folder).model
    assert model.tokenizer_sha256 == (
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )
    assert model.model == "model"


def test_every_start_has_its_own_incarnation(start_worker: StartWorker, llama_folder: Path) -> None:
    incarnations = set()
    for _ in range(2):
        worker = start_worker(WORKER_CONFIG)
        load(worker, llama_folder)
        initialize_cache(worker, 20)
        incarnations.add(warm_up(worker).incarnation)
    assert len(incarnations - {0}) == 2


Process = Callable[..., warm.Started]


@pytest.fixture
def start_process(tmp_path: Path) -> Iterator[Process]:
    """Starts `python -m worker_svc`, as a fork or not; kills processes that a test leaves."""
    processes: list[warm.Started] = []

    def start(*options: str, is_forked: bool = True) -> warm.Started:
        log_path = tmp_path / f"log-{len(processes)}"
        words, environ = ["--device", "cpu", *options], os.environ | {"OMP_NUM_THREADS": "1"}
        if is_forked:
            process: warm.Started = warm.start("worker_svc", words, REPOSITORY, log_path, environ)
        else:
            command = [sys.executable, "-m", "worker_svc", *words]
            with log_path.open("w") as log:
                process = subprocess.Popen(command, cwd=REPOSITORY, stderr=log, env=environ)
        process.log_path = log_path
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait(TIMEOUT_S)


def wait_for_line(process: warm.Started, text: str) -> str:
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        for line in process.log_path.read_text().splitlines():
            if text in line:
                return line
        assert process.poll() is None, process.log_path.read_text()
        time.sleep(0.05)
    raise AssertionError(f"{text!r} never came: {process.log_path.read_text()}")


def test_a_process_with_a_model_starts_up_serves_and_stops_soon(
    start_process: Process, llama_folder: Path
) -> None:
    model = ("--model", str(llama_folder), "--num-kv-blocks", "20")
    process = start_process(*model, "--port", "0", is_forked=False)
    port = wait_for_line(process, "listening on").rsplit(":", 1)[1]
    wait_for_line(process, "worker is READY")
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert health(channel) == health_pb2.HealthCheckResponse.SERVING
        attachment = Attachment(channel, epoch=1)
        assert attachment.receive_description().num_blocks == 20
        second = start_process("--port", port)
        assert second.wait(TIMEOUT_S) == 1
        assert "is the port in use?" in second.log_path.read_text()
        process.send_signal(signal.SIGTERM)
        signalled_s = time.monotonic()
        assert attachment.status() is grpc.StatusCode.UNAVAILABLE
        assert process.wait(TIMEOUT_S) == 0
        assert time.monotonic() - signalled_s < patience(5)


def test_a_process_whose_model_cannot_be_loaded_says_why_and_exits_with_1(
    start_process: Process, llama_folder: Path, tmp_path: Path
) -> None:
    folder = with_key(llama_folder, tmp_path / "there", "final_logit_softcapping", 30.0)
    process = start_process("--model", str(folder), "--port", "0")
    assert process.wait(TIMEOUT_S) == 1
    text = process.log_path.read_text()
    assert "worker is FAILED" in text
    assert "final_logit_softcapping" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    "size", [("--num-kv-blocks", "9"), ("--kv-cache-gib", "0.00001"), ("--draft-model",)]
)
def test_a_cache_that_cannot_hold_one_sequence_is_told_before_weights_are_read(
    size: tuple[str, ...], start_process: Process, llama_folder: Path, tmp_path: Path
) -> None:
    """The model's own length is the longest sequence; there are no weights here to be read."""
    folder = tmp_path / "model"
    shutil.copytree(llama_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    if size == ("--draft-model",):  # there is room for the blocks of one model
        one = 17 * 2 * 2 * 16 * 2 * 16 * 4 / (1 << 30)
        size = (*size, str(folder), "--kv-cache-gib", str(1.5 * one), "--dtype", "float32")
    options = ("--model", str(folder), "--port", "0", "--device", "cpu")
    process = start_process(*options, *size)
    assert process.wait(TIMEOUT_S) == 1
    text = process.log_path.read_text()
    assert "max_model_len 256 needs 16" in text and "reading weights" not in text
    assert "Traceback" not in text


def test_a_folder_that_is_not_there_is_refused_before_anything_starts(
    start_process: Process, tmp_path: Path
) -> None:
    process = start_process("--model", str(tmp_path / "nowhere"), "--port", "0")
    assert process.wait(TIMEOUT_S) == 2
    text = process.log_path.read_text()
    assert "nowhere" in text and "Traceback" not in text


def with_key(folder: Path, copy: Path, key: str, value: object) -> Path:
    """A copy of a model's folder with one more key in its config.json."""
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {key: value}))
    return copy


def test_a_model_with_a_key_that_is_ignored_is_served(
    start_worker: StartWorker, llama_folder: Path, tmp_path: Path
) -> None:
    folder = with_key(llama_folder, tmp_path / "new", "a_key_of_tomorrow", 1)
    refusing = start_worker(WORKER_CONFIG)
    code, details = refused(lambda: load(refusing, folder))
    assert (code, "a_key_of_tomorrow" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    ignoring = start_worker(replace(WORKER_CONFIG, ignore_config_keys=("a_key_of_tomorrow",)))
    assert load(ignoring, folder).model.model == "new"


def test_a_model_that_does_not_divide_among_ranks_is_refused_in_a_line(
    start_process: Process, llama_folder: Path
) -> None:
    options = ("--port", "0", "--device", "cpu", "--tensor-parallel-size", "3")
    process = start_process("--model", str(llama_folder), *options)
    assert process.wait(TIMEOUT_S) == 1
    text = process.log_path.read_text()
    assert re.search(r"start-up failed: .*num_attention_heads: \d does not divide among .* 3", text)
    assert "Traceback" not in text


def test_a_process_whose_step_hangs_ends_with_72_and_says_where(
    start_process: Process, llama_folder: Path
) -> None:
    model = ("--model", str(llama_folder), "--port", "0", "--num-kv-blocks", "20")
    limit_s = math.ceil(paced(2))
    process = start_process(*model, "--step-limit-s", str(limit_s), "--failpoint", "stall@2:600")
    port = wait_for_line(process, "listening on").rsplit(":", 1)[1]
    wait_for_line(process, "worker is READY")
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        attachment = Attachment(channel, epoch=1)
        attachment.receive_description()
        attachment.step(new_sequences=[make_sequence(0, [5, 6, 7], [1])], slots=[0])
        attachment.send(step_id=2, slots=[0])
        assert attachment.status() is grpc.StatusCode.UNAVAILABLE
    assert process.wait(TIMEOUT_S) == 72
    text = process.log_path.read_text()
    assert f"step 2 has not ended within {limit_s} s: this process ends with 72" in text
    assert "in before_step" in text  # the stacks of all threads


def test_a_scheduler_accepts_a_worker_with_a_small_step(
    start_worker: StartWorker, llama_folder: Path
) -> None:
    worker = start_worker(replace(WORKER_CONFIG, max_num_seqs=0, max_num_batched_tokens=32))
    load(worker, llama_folder, dtype="float32")
    initialize_cache(worker, 20)
    description = warm_up(worker)
    accepted = core_config(parse_scheduler_options([]), description)
    assert (accepted.max_num_seqs, accepted.max_num_batched_tokens) == (32, 32)


def test_options_become_the_configuration(llama_folder: Path) -> None:
    config = parse(["--model", str(llama_folder), "--max-num-seqs", "7", "--kv-cache-gib", "1.5"])
    assert config == WorkerConfig(model=llama_folder, max_num_seqs=7, kv_cache_gib=1.5)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--unknown", "1"],
        ["--dtype", "int8"],
        ["--block-size", "0"],
        ["--max-num-seqs", "-1"],
        ["--gpu-memory-utilization", "1.5"],
        ["--port", "70000"],
        ["--max-num", "3"],
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        parse(arguments)
    assert error.value.code == 2
    name = arguments[0].removeprefix("--")
    message = capsys.readouterr().err
    assert name in message or name.replace("-", "_") in message
