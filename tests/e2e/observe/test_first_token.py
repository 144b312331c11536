"""`pagewire explain` against running services: where the time until a first token went."""

import json
import subprocess
import sys

import grpc
import pytest

import pagewire
from pagewire.v1 import debug_pb2
from pagewire.v1.debug_pb2_grpc import DebugServiceStub
from tests.e2e.conftest import ROOT
from tests.e2e.observe.conftest import Observed
from tests.pace import patience


def explained(*options: str) -> str:
    command = [sys.executable, "-m", "pagewire", "explain", *options]
    return subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=patience(60)
    ).stdout


def test_the_parts_add_up_to_what_the_gateway_told_the_client(observed: Observed) -> None:
    gateway = f"127.0.0.1:{observed.product.grpc_port}"
    with pagewire.Client(gateway) as client:
        completion = client.generate("Once upon a time there was", max_tokens=8, ignore_eos=True)
    assert completion.timings is not None and completion.timings.first_token_s is not None
    answer = json.loads(explained(completion.request_id, "--json", "--target", gateway))
    path = answer["first_token"]
    assert {stage["service"] for stage in path} == {"gateway", "scheduler", "worker"}
    assert path[0]["name"].startswith("template") and path[-1]["name"] == "write"
    *until_read, _ = [stage.get("seconds", 0.0) for stage in path]
    assert sum(until_read) == pytest.approx(completion.timings.first_token_s, abs=1e-5)
    assert "first token after" in explained(completion.request_id, "--target", gateway)


def test_the_scheduler_tells_its_own_part(observed: Observed) -> None:
    gateway = f"127.0.0.1:{observed.product.grpc_port}"
    scheduler = f"127.0.0.1:{observed.product.scheduler_port}"
    with pagewire.Client(gateway) as client:
        completion = client.generate("Once", max_tokens=2, ignore_eos=True)
    answer = json.loads(explained(completion.request_id, "--json", "--scheduler", scheduler))
    assert {stage["service"] for stage in answer["first_token"]} == {"scheduler", "worker"}


def test_a_gateway_passes_on_that_a_request_is_unknown(observed: Observed) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{observed.product.grpc_port}") as channel:
        request = debug_pb2.ExplainRequest(request_id="never seen")
        with pytest.raises(grpc.RpcError) as told:
            DebugServiceStub(channel).Explain(request, timeout=patience(20))
    assert told.value.code() is grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]
    assert "never seen" in told.value.details()  # type: ignore[attr-defined]
