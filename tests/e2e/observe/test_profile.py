"""`pagewire profile` against running services: both on one time line, and nothing for others."""

import json
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagewire.v1 import debug_pb2
from pagewire.v1.debug_pb2_grpc import DebugServiceStub
from tests.e2e.conftest import ROOT
from tests.e2e.observe.conftest import Observed
from tests.pace import patience

STEPS = 20
Event = dict[str, Any]


def profile(observed: Observed, *options: str) -> "subprocess.Popen[str]":
    address = f"127.0.0.1:{observed.product.scheduler_port}"
    command = [sys.executable, "-m", "pagewire", "profile", "--scheduler", address, *options]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(observed: Observed, *options: str) -> tuple[int, str]:
    """(exit status, all output) of a recording during which requests are answered."""
    recording = profile(observed, *options)
    while recording.poll() is None:
        observed.complete(max_tokens=24)
    out, err = recording.communicate(timeout=patience(30))
    return recording.returncode, out + err


def test_steps_of_both_services_are_on_one_time_line(observed: Observed, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    code, said = run(observed, "--steps", str(STEPS), "--out", str(path))
    assert code == 0, said
    assert f"{STEPS} steps" in said
    events = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    worker = f"worker 127.0.0.1:{observed.product.worker_port}"
    assert sorted(names.values()) == ["scheduler", worker]
    by_service: dict[str, dict[str, dict[int, Event]]] = defaultdict(lambda: defaultdict(dict))
    for span in spans:
        by_service[names[span["pid"]]][span["name"]][span["args"].get("step", 0)] = span
    ours, theirs = by_service["scheduler"], by_service[worker]
    assert set(ours) >= {"step", "plan", "encode", "apply", "answer"}
    assert set(theirs) == {"step", "launch", "compute", "sample", "copy", "send"}
    assert len(theirs["step"]) == STEPS and theirs["step"].keys() == ours["step"].keys()
    for step in theirs["step"]:  # what took place within what
        assert is_within(theirs["compute"][step], theirs["step"][step])
        assert is_within(ours["answer"][step], ours["apply"][step])
        slack_us = 2 * json.loads(path.read_text())["otherData"]["clock_error_us"] + 1
        assert end_of(theirs["step"][step]) <= end_of(ours["step"][step]) + slack_us
    check_nesting(spans)


def is_within(inner: Event, outer: Event) -> bool:
    return bool(outer["ts"] - 0.01 <= inner["ts"] and end_of(inner) <= end_of(outer) + 0.01)


def end_of(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def check_nesting(spans: list[Event]) -> None:
    """Checks that each two of a track either nest or are apart: else a viewer draws them wrong."""
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for span in spans:
        tracks[span["pid"], span["tid"]].append(span)
    for track in tracks.values():
        track.sort(key=lambda e: (e["ts"], -e["dur"]))
        open_ends: list[float] = []
        for span in track:
            while open_ends and open_ends[-1] <= span["ts"] + 0.01:
                open_ends.pop()
            assert not open_ends or end_of(span) <= open_ends[-1] + 0.01, span
            open_ends.append(end_of(span))
        assert all(a["ts"] <= b["ts"] for a, b in pairwise(track))


def test_a_second_recording_is_refused_and_the_first_goes_on(observed: Observed) -> None:
    address = f"127.0.0.1:{observed.product.scheduler_port}"
    with grpc.insecure_channel(address) as channel:
        stub, limit_s = DebugServiceStub(channel), patience(60)
        five = debug_pb2.ProfileStepsRequest(steps=5)
        with ThreadPoolExecutor(2) as pool:  # either may come first
            both = [pool.submit(lambda: list(stub.ProfileSteps(five))) for _ in range(2)]
            done, others = wait(both, limit_s, FIRST_COMPLETED)
            (refused,), (first,) = done, others
            error = refused.exception()
            assert isinstance(error, grpc.RpcError)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "another recording is under way" in str(error.details())
            observed.complete(max_tokens=24)
            assert first.result(limit_s)[-1].num_steps == 5
        # Who leaves ends the recording, and makes room for the next.
        left = stub.ProfileSteps(debug_pb2.ProfileStepsRequest(steps=5), timeout=limit_s)
        left.cancel()
        deadline_s = time.monotonic() + patience(20)
        while True:
            short = debug_pb2.ProfileStepsRequest(steps=1, timeout_s=0.1)
            with pytest.raises(grpc.RpcError) as late:
                list(stub.ProfileSteps(short, timeout=limit_s))
            if late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                break
            assert late.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert time.monotonic() < deadline_s


def test_what_cannot_be_recorded_is_refused_by_name(observed: Observed, tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    for options, status, problem in (
        (("--steps", "0"), 2, "--steps: 0 is outside"),
        (("--kernels",), 1, "kernels: this worker computes on cpu"),
        (("--wait-s", "0.2"), 1, "steps: none was computed within 0.2 s"),
    ):
        done = profile(observed, *options, "--out", str(path))
        out, err = done.communicate(timeout=patience(60))
        assert (done.returncode, problem in err) == (status, True), out + err
    assert not path.exists()
