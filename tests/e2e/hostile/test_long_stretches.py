"""No caller's work holds the event loops, or the memory, that others need.

All cases run once, one after the other, while another client asks for the gateway's health.
"""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import SMALL, Product
from tests.e2e.stretches import NOTED_S, Stretch, stretches
from tests.pace import pace, patience

pytestmark = pytest.mark.slow

WATCHED = ("gateway", "scheduler_svc")
# Work that holds a loop should end within 20 ms. Ten times that is for collections of garbage, for
# several callbacks in one round, and for a processor that is shared. What this has found took from
# 100 ms to 10 s.
LONGEST_S = 10 * NOTED_S
MOST_GATEWAY_MIB = 1.2 * 1024
MIB = 1 << 20
Call = tuple[str, dict[str, Any]]  # path and body
NUM_UPLOADS = 60

TURN = {"role": "user", "content": "Hello there"}
PROMPT = list(range(100, 2000))


def tool(number: int) -> dict[str, Any]:
    properties = {f"p{index}": {"type": "string", "description": "x" * 50} for index in range(30)}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": f"f{number}", "parameters": parameters}}


def words(num_bytes: int) -> str:
    return ("some words and 12 " * (num_bytes // 18 + 1))[:num_bytes]


def completion(**fields: Any) -> Call:
    return "/v1/completions", {"prompt": "Hello", "max_tokens": 1, **fields}


def chat(**fields: Any) -> Call:
    return "/v1/chat/completions", {"messages": [TURN], "max_tokens": 1, **fields}


# One call each, made when it is sent; some are served and some refused, which is for other tests.
CALLS: dict[str, Callable[[], Call]] = {
    "largest text": lambda: ("/tokenize", {"prompt": words(MIB)}),
    "text of 30 MB": lambda: ("/tokenize", {"prompt": words(30_000_000)}),
    "wide text": lambda: ("/tokenize", {"prompt": "\N{GRINNING FACE}" * (MIB // 4)}),
    "long prompt": lambda: completion(prompt=words(3 * MIB)),
    "prompt scores": lambda: completion(prompt=PROMPT, prompt_logprobs=20),
    "streamed prompt scores": lambda: completion(prompt=PROMPT, prompt_logprobs=20, stream=True),
    "scores of a chat": lambda: chat(
        messages=[{"role": "user", "content": words(6000)}], prompt_logprobs=20
    ),
    "echo": lambda: completion(prompt=[PROMPT[:600]] * 2, echo=True, logprobs=20, n=2),
    "15 million ids": lambda: completion(prompt=[1] * 15_000_000),
    "a million wrong elements": lambda: completion(stop=[1] * 1_000_000),
    "a thousand turns": lambda: chat(messages=[TURN, {"role": "assistant", "content": "ok"}] * 512),
    "a thousand items": lambda: ("/v1/responses", {"input": [TURN] * 1000, "max_output_tokens": 1}),
    "128 tools": lambda: chat(tools=[tool(number) for number in range(128)]),
    "large stop strings": lambda: completion(
        stop=[f"{'x' * 1000}{number}" for number in range(16)], n=16, max_tokens=20
    ),
    "bad words": lambda: completion(bad_words=[f"{'ab 1 ' * 30}{number}" for number in range(128)]),
    "biases": lambda: completion(logit_bias={str(number): 1 for number in range(1024)}, n=16),
    "allowed ids": lambda: completion(allowed_token_ids=list(range(16384)), n=16),
    "many prompts": lambda: completion(prompt=[f"{number} times" for number in range(512)]),
    "many inputs": lambda: (
        "/v1/embeddings",
        {"input": [f"{number} times" for number in range(512)]},
    ),
    "many documents": lambda: (
        "/v1/rerank",
        {"query": "q", "documents": [f"{number} times" for number in range(256)]},
    ),
    "many ids": lambda: ("/detokenize", {"tokens": [5] * 260_000}),
    "body of 31 MiB": lambda: chat(messages=[{"role": "user", "content": "x" * (31 * MIB)}]),
}


@dataclass(slots=True)
class Suite:
    """The statuses, stretches and peak memory of one run."""

    found: dict[str, dict[str, list[Stretch]]] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    answers: list[int | str] = field(default_factory=list)  # of /health
    peak_mib: float = 0.0
    pids: list[tuple[str, int]] = field(default_factory=list)


@pytest.fixture(scope="module")
def suite(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    logs = tmp_path_factory.mktemp("watched")
    with Product(tiny_model, logs, SMALL, watched=WATCHED) as product, ExitStack() as stack:
        product.start()
        seen = Suite(pids=[(name, one.pid) for name, one in product.processes.items()])
        post(product, *completion(stream=True))  # loads what the first answers load
        post(product, *chat())
        asks = asking(product, seen.answers)
        stack.callback(asks)
        for name, call in CALLS.items():
            watched(product, seen, name, lambda call=call: post(product, *call()))
        watched(product, seen, "clients that leave", lambda: leave(product))
        watched(product, seen, "unfinished uploads", lambda: upload(product))
        asks()
        seen.peak_mib = peak_mib(product.processes["gateway"].pid)
        for name, process in product.processes.items():
            assert process.poll() is None, product.log_of(name)
        yield seen


def post(product: Product, path: str, body: dict[str, Any]) -> int:
    # Written here: the client's own writer takes spaces, which is another third of 15 million ids.
    data = json.dumps(body, separators=(",", ":")).encode()
    headers = {"content-type": "application/json"}
    url = f"{product.url}{path}"
    return httpx.post(url, content=data, headers=headers, timeout=patience(60)).status_code


def watched(product: Product, seen: Suite, name: str, work: Callable[[], int]) -> None:
    before = {module: len(stretches(product.report_of(module))) for module in WATCHED}
    seen.statuses[name] = work()
    post(product, "/tokenize", {"prompt": "Hello"})  # a stretch is noted at its end
    seen.found[name] = {
        module: stretches(product.report_of(module))[before[module] :] for module in WATCHED
    }


def asking(product: Product, answers: list[int | str]) -> Callable[[], None]:
    """Asks for the health again and again, until the function returned is called."""
    ended = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=product.url, timeout=patience(10)) as client:
            while not ended.wait(0.05):
                try:
                    answers.append(client.get("/health").status_code)
                except httpx.HTTPError as error:
                    answers.append(repr(error))

    thread = threading.Thread(target=ask)
    thread.start()

    def end() -> None:
        ended.set()
        thread.join()

    return end


def request_head(path: str, num_bytes: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {num_bytes}\r\n\r\n"
    ).encode()


def leave(product: Product) -> int:
    """Eight clients send a text of the largest size and leave; another one's prompt is next."""
    body = json.dumps({"prompt": words(MIB)}).encode()
    for _ in range(8):
        with socket.create_connection(("127.0.0.1", product.http_port)) as client:
            client.sendall(request_head("/tokenize", len(body)) + body)
    return post(product, *completion(prompt=words(5000)))


def upload(product: Product) -> int:
    """Many clients send most of a large body, and no more; another one's is answered."""
    with ExitStack() as stack:
        for _ in range(NUM_UPLOADS):
            client = socket.create_connection(("127.0.0.1", product.http_port))
            stack.enter_context(client)
            client.settimeout(patience(2))
            with suppress(OSError):  # it may be refused meanwhile
                client.sendall(request_head("/v1/chat/completions", 31 * MIB))
                for _ in range(30):
                    client.sendall(b" " * MIB)
        return httpx.get(f"{product.url}/v1/models", timeout=patience(20)).status_code


def peak_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


@pytest.mark.parametrize("name", [*CALLS, "clients that leave", "unfinished uploads"])
def test_no_event_loop_computes_for_long(name: str, suite: Suite) -> None:
    assert suite.statuses[name] in (200, 400, 413), name
    for module in WATCHED:
        for stretch in suite.found[name][module]:
            assert stretch.cpu_s < LONGEST_S * pace(), (module, stretch)


def test_the_gateway_stays_small(suite: Suite) -> None:
    assert suite.peak_mib < MOST_GATEWAY_MIB


def test_another_client_is_answered_throughout(suite: Suite) -> None:
    assert set(suite.answers) == {200}
    assert len(suite.answers) >= len(suite.found)


def test_other_callers_are_served_while_texts_and_uploads_wait(suite: Suite) -> None:
    assert suite.statuses["unfinished uploads"] == 200
    assert suite.statuses["clients that leave"] in (200, 400)
