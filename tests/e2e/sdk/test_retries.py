"""The SDK through a live stack whose gateway is killed: calls are answered, streams go on."""

import asyncio
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pydantic
import pytest

import pagewire
from pagewire.admin import Admin
from tests.e2e.conftest import Product
from tests.pace import patience
from tests.tiny_model import TOOL_TEMPLATE

pytestmark = pytest.mark.slow
NUM_TOKENS = 120
LONG = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 1.0, "seed": 11}
EFFORT = "{% if reasoning_effort %}Effort: {{ reasoning_effort }}.\n{% endif %}"
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TURNS = [  # as OpenAI's library writes them
    {"role": "user", "content": [{"type": "text", "text": "Look."}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "Rain."},
]


class Verdict(pydantic.RootModel[Literal["yes", "no"]]):
    """A form that a model of random weights meets: it has no room for blanks."""


@pytest.fixture(scope="module")
def stack(terse_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    folder = tmp_path_factory.mktemp("sdk")
    model = Path(shutil.copytree(terse_model, folder / "tiny"))
    (model / "chat_template.jinja").write_text(EFFORT + TOOL_TEMPLATE)
    queue = ("--max-num-seqs", "4", "--max-waiting-requests", "3", "--policy", "priority")
    # Of slow steps: requests still run when the gateway is to be killed, on any machine.
    small = ("--threads", "1", "--kv-cache-gib", "0.2", "--failpoint", "slow@1:0.01")
    with Product(model, folder, small) as running:
        running.start_worker()
        running.start_scheduler(*queue)
        running.start_gateway()
        running.wait_until_ready()
        yield running


@pytest.fixture
def client(stack: Product, monkeypatch: pytest.MonkeyPatch) -> Iterator[pagewire.Client]:
    """A client whose settings come from the environment."""
    monkeypatch.setenv("PAGEWIRE_TARGET", f"127.0.0.1:{stack.grpc_port}")
    monkeypatch.setenv("PAGEWIRE_SCHEDULER", f"127.0.0.1:{stack.scheduler_port}")
    monkeypatch.setenv("PAGEWIRE_TIMEOUT_S", str(patience(120)))
    monkeypatch.setenv("PAGEWIRE_MAX_RETRIES", "100")  # of 10 requests 7 find room
    with pagewire.Client(resume_timeout_s=patience(60)) as made:
        made.wait_until_ready(patience(60))
        yield made


def wait_until_one_runs(stack: Product, count: int = 1) -> None:
    """Waits until so many requests have tokens."""
    deadline_s = time.monotonic() + patience(60)
    with Admin(f"127.0.0.1:{stack.scheduler_port}") as admin:
        while sum(one.num_output_tokens > 0 for one in admin.requests()) < count:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


def kill_gateway_once_running(stack: Product, count: int = 1) -> threading.Thread:
    """Kills the gateway when requests have tokens, and starts another, in a thread."""

    def kill() -> None:
        wait_until_one_runs(stack, count)
        gateway = stack.processes["gateway"]
        gateway.kill()
        gateway.wait()
        stack.start_gateway()

    killer = threading.Thread(target=kill)
    killer.start()
    return killer


def test_whole_answers_come_although_their_gateway_is_killed(
    stack: Product, client: pagewire.Client
) -> None:
    calm = client.generate("Once", **LONG)
    assert calm.timings and calm.timings.measured_by == "gateway"
    assert 0 <= (calm.timings.queue_s or 0) <= (calm.timings.first_token_s or 0)

    async def ask() -> list[pagewire.Completion]:
        async with pagewire.AsyncClient(resume_timeout_s=patience(60)) as own:
            await own.wait_until_ready(patience(60))
            blocking = asyncio.to_thread(client.generate, "Once", **LONG)
            return await asyncio.gather(own.generate("Once", **LONG), blocking)

    killer = kill_gateway_once_running(stack, count=2)
    disturbed = asyncio.run(ask())
    killer.join()
    assert [one.token_ids for one in disturbed] == [calm.token_ids] * 2
    assert len(calm.token_ids) == NUM_TOKENS


def test_a_batch_of_chats_comes_although_the_queue_is_full_and_the_gateway_is_killed(
    stack: Product, client: pagewire.Client
) -> None:
    calm = client.chat(TURNS, **LONG)
    with Admin() as admin:
        before = admin.status().num_overloaded
        killer = kill_gateway_once_running(stack)
        disturbed = client.batch_chat(
            [*[TURNS] * 9, "Hello" * 9999],
            max_concurrency=10,
            return_errors=True,
            **LONG,
        )
        killer.join()
        assert admin.status().num_overloaded > before  # and came again when they were told to
    *answers, failed = disturbed
    assert isinstance(failed, pagewire.InvalidArgument)  # too long: the others' answers are kept
    assert all(isinstance(one, pagewire.Completion) for one in answers)
    assert {one.token_ids for one in answers} == {calm.token_ids}


def test_a_stream_of_several_outputs_goes_on_although_the_gateway_is_killed(
    stack: Product, client: pagewire.Client
) -> None:
    calm = client.generate("Once", n=3, **LONG)
    killer = kill_gateway_once_running(stack, count=3)
    pieces, stream = [], client.stream("Once", n=3, **LONG)
    for piece in stream:
        pieces.append(piece)
    killer.join()
    disturbed = stream.completion()
    for one, other in zip((calm, *calm.more), (disturbed, *disturbed.more), strict=True):
        assert one.token_ids == other.token_ids
        assert one.text == other.text
    assert {piece.index for piece in pieces} == {0, 1, 2}
    assert disturbed.timings and disturbed.timings.measured_by == "client"


def test_a_key_runs_a_call_once_and_an_operator_ends_it(
    stack: Product, client: pagewire.Client
) -> None:
    with Admin(f"127.0.0.1:{stack.scheduler_port}") as admin:
        before = admin.status().num_accepted
        first = client.generate("Once", idempotency_key="nightly", **LONG)
        again = client.generate("Once", idempotency_key="nightly", **LONG)
        assert again == first
        assert admin.status().num_accepted == before + 1
        stream = client.stream("Once", request_id="to-abort", **LONG | {"max_tokens": 400})
        next(stream)
        admin.set_priority("to-abort", -1)
        with pytest.raises(pagewire.NotFound, match="gone"):
            admin.set_priority("gone", -1)
        assert admin.abort("to-abort") == ("to-abort",)
        assert stream.completion().finish_reason == "abort"
        assert not admin.requests()


def test_a_model_class_is_the_form_of_a_real_answer(client: pagewire.Client) -> None:
    answer = client.chat("Is it?", structured_output=Verdict, max_tokens=40, temperature=0)
    assert isinstance(answer.parsed, Verdict), answer
    plain = client.chat("Is it?", max_tokens=1)
    low = client.chat("Is it?", max_tokens=1, reasoning_effort="low")
    told = len(client.tokenize("Effort: low.\n", add_special_tokens=False))
    assert low.usage.prompt_tokens == plain.usage.prompt_tokens + told
    scored = client.generate("Once", logprobs=0, max_tokens=4)
    assert scored.cumulative_logprob == sum(token.logprob for token in scored.logprobs) < 0
