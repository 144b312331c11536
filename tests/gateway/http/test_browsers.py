"""Needs of a browser: calls from pages of other origins, and a page of documentation."""

import logging
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from gateway.errors.refusals import loggable
from gateway.process.config import parse_args
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc, types_pb2
from tests.gateway.http_calls import error_of
from wire.log_rate import FewPerSecond

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
PAGE = "https://page.example"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-tenant",
}


async def test_pages_of_other_origins_may_not_call_unless_an_option_says_so(running: Any) -> None:
    response = await running.http.options(CHAT, headers=PREFLIGHT)
    error_of(response, 405)
    answer = await running.http.get("/v1/models", headers={"origin": PAGE})
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("origins", [(PAGE, "http://localhost:3000"), ("*",)])
async def test_a_preflight_is_answered_without_a_key_and_a_refusal_can_be_read(
    start: Callable[..., Any], origins: tuple[str, ...]
) -> None:
    running = await start(cors_origins=origins, api_key="secret")
    response = await running.http.options(CHAT, headers=PREFLIGHT)
    assert response.status_code == 200
    headers = response.headers
    assert headers["access-control-allow-origin"] in (PAGE, "*")
    assert "POST" in headers["access-control-allow-methods"]
    allowed = headers["access-control-allow-headers"]
    assert all(name in allowed for name in ("authorization", "content-type", "x-tenant"))
    refused = await running.http.get("/v1/models", headers={"origin": PAGE})
    assert refused.status_code == 401  # and the page may read why
    assert refused.headers["access-control-allow-origin"] in (PAGE, "*")
    known = {"origin": PAGE, "authorization": "Bearer secret"}
    assert (await running.http.get("/v1/models", headers=known)).status_code == 200
    if origins != ("*",):
        foreign = PREFLIGHT | {"origin": "https://other.example"}
        assert (await running.http.options(CHAT, headers=foreign)).status_code == 400


@pytest.mark.parametrize("origin", ["page.example", "https://page.example/path", "https://a b"])
async def test_what_is_no_origin_is_refused(
    origin: str, model_folder: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(model_folder), "--scheduler", "s:1", "--cors-origins", origin]
    with pytest.raises(SystemExit):
        parse_args(words)
    assert f"--cors-origins: {origin!r} is no origin" in capsys.readouterr().err


async def test_the_documentation_is_a_page_without_a_foreign_host_or_a_script(
    start: Callable[..., Any],
) -> None:
    running = await start(api_key="secret")
    response = await running.http.get("/docs")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    html = response.text
    assert "//" not in html and "<script" not in html
    for text in ("POST /v1/chat/completions", 'id="ChatCompletionBody"', "max_completion_tokens"):
        assert text in html
    assert '<a href="#ChatMessage">' in html and "(required)" in html


@pytest.mark.parametrize(
    ("route", "body", "line"),
    [
        (CHAT, {"messages": [], "temperature": 9}, "400 invalid_value, field messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "400 invalid_value, field messages[0].content"),
        (CHAT, {"messages": "m", "my secret": 1}, "field"),
        ("/v1/completions", {"prompt": "my secret", "best_of": 777}, "field best_of"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"tools": 7}},
            "chat_template_kwargs.tools",
        ),
        ("/v1/completions", {"prompt": "x", "model": "my secret"}, "404 model_not_found"),
    ],
)
async def test_a_refused_request_is_logged_by_code_and_field_and_never_by_content(
    route: str, body: dict[str, Any], line: str, running: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert (await running.http.post(route, json=body)).status_code >= 400
    (record,) = [r for r in caplog.records if r.name == "gateway.errors.refusals"]
    message = record.getMessage()
    assert message.startswith(f"refused POST {route}: ") and line in message
    assert "secret" not in caplog.text


async def test_a_field_that_a_caller_chose_is_a_star_in_the_log(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    running = await start(strict_requests=True)
    caplog.set_level(logging.INFO)
    body = {"prompt": "my secret", "my secret": 7}
    assert (await running.http.post("/v1/completions", json=body)).status_code == 400
    (record,) = [r for r in caplog.records if r.name == "gateway.errors.refusals"]
    assert record.getMessage().endswith("parameter, field *")


async def test_a_refused_call_is_logged_too(running: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    for sampling in (types_pb2.SamplingParams(temperature=9), types_pb2.SamplingParams(top_k=-5)):
        options = pb.GenerationOptions(sampling=sampling)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Generate(
                pb.GenerateRequest(prompt=pb.Prompt(text="my secret"), options=options)
            )
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("refused")]
    assert len(lines) == 2 and "secret" not in caplog.text
    assert "/pagewire.v1.InferenceService/Generate: 400 invalid_value, field " in lines[0]
    assert "temperature" in lines[0] and "top_k" in lines[1]


async def test_a_part_of_a_field_that_a_caller_chose_is_a_star() -> None:
    known = {"messages", "content"}
    assert loggable("messages[3].content", known) == "messages[3].content"
    assert loggable("messages[3].secret.content", known) == "messages[3].*.content"
    assert loggable("123456789", known) == "*"


async def test_a_log_that_callers_fill_has_few_lines_a_second() -> None:
    now = [0.0]
    few = FewPerSecond(2, lambda: now[0])

    def passes() -> str:
        record = logging.LogRecord("n", logging.INFO, "f", 1, "refused", (), None)
        return record.getMessage() if few.filter(record) else ""

    assert [passes() for _ in range(4)] == ["refused", "refused", "", ""]
    now[0] = 1.5
    assert passes() == "refused (2 such lines before it left out)"
    assert passes() == "refused"
