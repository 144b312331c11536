"""grpcurl with all three services, as in docs/grpcurl.md."""

import json
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import Product
from tests.pace import patience

MAIN_SERVICE = {
    "grpc_port": "pagewire.v1.InferenceService",
    "scheduler_port": "pagewire.v1.SchedulerService",
    "worker_port": "pagewire.v1.WorkerService",
}


@pytest.mark.parametrize("port_name", MAIN_SERVICE)
def test_list_and_describe_work_on_every_service(product: Product, port_name: str) -> None:
    port, service = getattr(product, port_name), MAIN_SERVICE[port_name]
    listed = product.grpcurl(port, "list").split()
    assert {service, "pagewire.v1.DebugService", "grpc.health.v1.Health"} <= set(listed)
    assert f"service {service.rsplit('.')[-1]}" in product.grpcurl(port, "describe", service)
    method = product.grpcurl(port, "list", service).split()[0]
    assert "rpc " in product.grpcurl(port, "describe", method)
    assert "message " in product.grpcurl(port, "describe", "pagewire.v1.ListRequestsResponse")


@pytest.mark.parametrize("port_name", MAIN_SERVICE)
def test_health_says_serving_by_name(product: Product, port_name: str) -> None:
    port = getattr(product, port_name)
    for name in ("", MAIN_SERVICE[port_name]):
        answer = product.grpcurl(port, "grpc.health.v1.Health/Check", data={"service": name})
        assert json.loads(answer) == {"status": "SERVING"}
    unknown = product.run_grpcurl(port, "grpc.health.v1.Health/Check", data={"service": "nobody"})
    assert unknown.returncode == 64 + 5  # NOT_FOUND


def test_text_is_generated_at_the_gateway(product: Product) -> None:
    answer = product.grpcurl(
        product.grpc_port,
        "pagewire.v1.InferenceService/Chat",
        data={
            "messages": [{"role": "user", "content": "What is the capital of Japan?"}],
            "options": {"sampling": {"temperature": 0, "max_tokens": 32}},
        },
    )
    assert "Tokyo" in json.loads(answer)["output"]["text"]


def test_token_ids_are_generated_at_the_scheduler(product: Product) -> None:
    tokenized = product.grpcurl(
        product.grpc_port, "pagewire.v1.InferenceService/Tokenize", data={"text": "One two three"}
    )
    stream = product.grpcurl(
        product.scheduler_port,
        "pagewire.v1.SchedulerService/Generate",
        data={
            "prompt_token_ids": json.loads(tokenized)["token_ids"],
            "sampling": {"temperature": 0, "max_tokens": 8, "ignore_eos": True},
        },
    )
    token_ids = []
    decoder, rest = json.JSONDecoder(), stream.strip()
    while rest:
        message, end = decoder.raw_decode(rest)
        token_ids += message.get("token_ids", [])
        rest = rest[end:].lstrip()
    assert message["finish_reason"] == "FINISH_REASON_LENGTH"
    text = product.grpcurl(
        product.grpc_port, "pagewire.v1.InferenceService/Detokenize", data={"token_ids": token_ids}
    )
    assert len(token_ids) == 8
    assert json.loads(text)["text"]


def test_bad_input_is_a_status_that_names_the_field(product: Product) -> None:
    refused = product.run_grpcurl(
        product.scheduler_port,
        "pagewire.v1.SchedulerService/Generate",
        data={"prompt_token_ids": []},
    )
    assert refused.returncode == 64 + 3  # INVALID_ARGUMENT
    assert "prompt_token_ids" in refused.stderr
    unknown = product.run_grpcurl(
        product.grpc_port, "pagewire.v1.InferenceService/Generate", data={"promt": {}}
    )
    assert unknown.returncode != 0
    assert "promt" in unknown.stderr


def test_the_debug_service_answers_in_words(product: Product) -> None:
    debug = "pagewire.v1.DebugService"
    for port in (product.grpc_port, product.scheduler_port, product.worker_port):
        product.grpcurl(port, f"{debug}/ListRequests")
    pool = json.loads(product.grpcurl(product.scheduler_port, f"{debug}/DumpBlockPool"))
    assert "blocks of 16 tokens are in use" in pool["summary"]
    for port in (product.scheduler_port, product.worker_port):
        steps = json.loads(product.grpcurl(port, f"{debug}/ListSteps", data={"limit": 3}))
        assert "step" in steps["steps"][0]["summary"]
    refused = product.run_grpcurl(product.worker_port, f"{debug}/DumpBlockPool")
    assert refused.returncode == 64 + 12  # UNIMPLEMENTED
    assert "scheduler" in refused.stderr


def test_health_says_not_serving_until_a_worker_is_ready(model: Path, tmp_path: Path) -> None:
    with Product(model, tmp_path) as lonely:
        lonely.start_scheduler()
        lonely.start_gateway()
        for port, service in (
            (lonely.scheduler_port, "pagewire.v1.SchedulerService"),
            (lonely.grpc_port, "pagewire.v1.InferenceService"),
        ):
            check = "grpc.health.v1.Health/Check"
            answer = eventually_answers(lonely, port, check, {"service": service})
            assert json.loads(answer) == {"status": "NOT_SERVING"}
        refused = lonely.run_grpcurl(
            lonely.grpc_port,
            "pagewire.v1.InferenceService/Generate",
            data={"prompt": {"text": "Hello"}},
        )
        assert refused.returncode == 64 + 14  # UNAVAILABLE
        told = lonely.post("/v1/completions", {"prompt": "Hello"})
        assert (told.status_code, told.headers["retry-after"]) == (503, "1")
        for ours in ("127.0.0.1", str(lonely.scheduler_port), str(lonely.worker_port)):
            assert ours not in told.text + refused.stderr.partition("Message:")[2]


def eventually_answers(product: Product, port: int, method: str, data: object) -> str:
    """The output of grpcurl once the server listens."""
    deadline = time.monotonic() + patience(30)
    while True:
        done = product.run_grpcurl(port, method, data=data)
        if done.returncode == 0:
            return done.stdout
        assert time.monotonic() < deadline, done.stderr
        time.sleep(0.2)
