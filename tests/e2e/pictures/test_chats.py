"""Pictures in chats of every API, through all services: tokens equal transformers' for the file."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest
from PIL import Image

from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc, types_pb2
from tests.e2e.conftest import SMALL, Product
from tests.e2e.pictures.stage import (
    WORDS,
    Expected,
    Part,
    data_url,
    drawing,
    file_of,
    save_pictured_model,
)
from tests.pace import patience
from tests.worker_svc.transformers_models.pictured import GOLDEN

NUM_TOKENS = 8
pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True)
class Served:
    """A family's model in all services, and its tokens by transformers."""

    name: str
    product: Product
    expected: Expected

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a body; asserts nothing of its status."""
        found: dict[str, Any] = self.product.post(path, body).json()
        return found

    def chat(self, content: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """The answer to one turn of parts."""
        body = {"messages": [{"role": "user", "content": content}], **GREEDY, **fields}
        return self.post("/v1/chat/completions", body)


GREEDY = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module", params=GOLDEN)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    name: str = request.param
    folder = save_pictured_model(name, tmp_path_factory.mktemp("pictured") / name)
    options = (*SMALL, "--model-impl", "transformers", "--block-size", "4")
    logs = tmp_path_factory.mktemp("logs")
    with Product(folder, logs, options) as running:
        running.start()
        yield Served(name, running, Expected(name, folder))


def words_of(ids: list[int]) -> str:
    """The text of some ids, without those of control."""
    return " ".join(f"w{n}" for n in ids if n not in WORDS)


def text(*ids: int) -> dict[str, Any]:
    return {"type": "text", "text": words_of(list(ids))}


def openai(picture: Any, kind: str = "PNG") -> dict[str, Any]:
    url = data_url(file_of(picture, kind), f"image/{kind.lower()}")
    return {"type": "image_url", "image_url": {"url": url, "detail": "high"}}


def wanted(served: Served, parts: list[Part]) -> str:
    return words_of(served.expected.greedy(parts, NUM_TOKENS))


def test_a_picture_first_last_and_several(served: Served) -> None:
    one, two = drawing(1, 24, 16), drawing(2, 13, 30)
    layouts: list[tuple[list[dict[str, Any]], list[Part]]] = [
        ([openai(one), text(5, 6)], [one, 5, 6]),
        ([text(7, 8, 9), openai(two)], [7, 8, 9, two]),
        (
            [text(3), openai(one), openai(two), text(4), text(11), openai(one)],
            [3, one, two, 4, 11, one],
        ),
    ]
    for content, parts in layouts:
        answer = served.chat(content)
        assert answer["choices"][0]["message"]["content"] == wanted(served, parts)
        assert answer["usage"]["prompt_tokens"] == len(served.expected.prompt(parts))


def test_a_prefix_with_its_picture_is_found_again(served: Served) -> None:
    picture = drawing(3, 24, 24)
    parts: list[Part] = [*range(20, 29), picture, 30, 31]
    content = [text(*range(20, 29)), openai(picture), text(30, 31)]
    first, again = served.chat(content), served.chat(content)
    contents = [answer["choices"][0]["message"]["content"] for answer in (first, again)]
    assert contents == [wanted(served, parts)] * 2
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 12 or served.name == "qwen3_5_vl"


def test_every_api_takes_pictures_and_tools_return_them(served: Served) -> None:
    picture = drawing(4, 20, 12)
    content = file_of(picture, "WEBP", lossless=True)
    url = data_url(content, "image/webp")
    expected = wanted(served, [41, picture, 42])
    responses = served.post(
        "/v1/responses",
        {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "w41"},
                        {"type": "input_image", "image_url": url, "detail": "auto"},
                        {"type": "input_text", "text": "w42"},
                    ],
                }
            ],
            "temperature": 0,
            "max_output_tokens": NUM_TOKENS,
        },
    )
    assert responses["output"][-1]["content"][0]["text"] == expected
    source = {"type": "base64", "media_type": "image/webp", "data": url.partition(",")[2]}
    block = {"type": "image", "source": source}
    asked = {"max_tokens": NUM_TOKENS, "temperature": 0}
    turns: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "w41"}, block, {"type": "text", "text": "w42"}],
        }
    ]
    answer = served.post("/v1/messages", {"messages": turns, **asked})
    assert answer["content"][0]["text"] == expected


def test_one_picture_of_two_requests_is_encoded_once(served: Served) -> None:
    def counted(how: str) -> float:
        url = f"http://127.0.0.1:{served.product.worker_metrics_port}/metrics"
        lines = httpx.get(url, timeout=patience(30)).text.splitlines()
        (line,) = [
            one for one in lines if one.startswith("pagewire_worker_pictures_total") and how in one
        ]
        return float(line.rpartition(" ")[2])

    picture = drawing(5, 16, 16)
    encoded, found = counted("encoded"), counted("found")
    for last in (51, 52):
        served.chat([openai(picture), text(last)])
    assert (counted("encoded"), counted("found")) == (encoded + 1, found + 1)


def test_what_is_no_picture_is_refused_by_its_place_and_the_next_is_answered(
    served: Served,
) -> None:
    url = {"url": data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml")}
    answer = served.chat([text(5), {"type": "image_url", "image_url": url}])
    assert answer["error"]["param"] == "messages[0].content[1]"
    assert "'image/svg+xml' is not read" in answer["error"]["message"]
    answer = served.chat([text(5), {"type": "text", "text": "<image>"}, openai(drawing(1, 16, 16))])
    assert "spells the token that stands for pictures" in answer["error"]["message"]
    assert served.chat([openai(drawing(1, 16, 16)), text(5)])["choices"]


def test_grpc_takes_files_and_a_tool_returns_one(served: Served) -> None:
    picture = drawing(6, 12, 12)
    with grpc.insecure_channel(f"127.0.0.1:{served.product.grpc_port}") as channel:
        turn = pb.ChatMessage(role="user", content="w61", picture_files=[file_of(picture, "GIF")])
        options = pb.GenerationOptions(
            sampling=types_pb2.SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        )
        answer = inference_pb2_grpc.InferenceServiceStub(channel).Chat(
            pb.ChatRequest(messages=[turn], options=options), timeout=patience(120)
        )
    shown = Image.open(io.BytesIO(file_of(picture, "GIF"))).convert("RGB")
    assert answer.output.text == wanted(served, [shown, 61])
    source = {"type": "base64", "media_type": "image/png"}
    source["data"] = data_url(file_of(picture)).partition(",")[2]
    turns = [
        {"role": "user", "content": "w5"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t",
                    "content": [
                        {"type": "text", "text": "w7"},
                        {"type": "image", "source": source},
                    ],
                }
            ],
        },
    ]
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    asked = {"max_tokens": NUM_TOKENS, "temperature": 0, "tools": tools}
    found = served.post("/v1/messages", {"messages": turns, **asked})
    expected = served.expected.prompt([picture])
    assert found["usage"]["input_tokens"] + found["usage"]["cache_read_input_tokens"] > len(
        expected
    )
