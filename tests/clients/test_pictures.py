"""Pictures that clients send reach the model as they are: the same text as by a plain request."""

import base64
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.conftest import NUM_TOKENS, PICTURED, WORDS, Pictured, chat_parts, data_url

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic", reason="anthropic is not here: make test-clients")
litellm = pytest.importorskip("litellm")
langchain_openai = pytest.importorskip("langchain_openai")
messages = pytest.importorskip("langchain_core.messages")


@pytest.fixture(scope="module")
def expected(pictured: Pictured) -> str:
    """The text for the first picture, which the second does not have."""
    one, two = (pictured.text_of(content) for content in pictured.files)
    assert one and one != two
    return one


@pytest.fixture(scope="module")
def by_openai(pictured: Pictured) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{pictured.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openais_chats(by_openai: Any, pictured: Pictured, expected: str) -> None:
    user = {"role": "user", "content": chat_parts(pictured.files[0])}
    answer = by_openai.chat.completions.create(
        model=PICTURED, messages=[user], max_tokens=NUM_TOKENS, temperature=0
    )
    assert answer.choices[0].message.content == expected


def test_openais_responses(by_openai: Any, pictured: Pictured, expected: str) -> None:
    picture = {"type": "input_image", "image_url": data_url(pictured.files[0]), "detail": "auto"}
    user = {"role": "user", "content": [{"type": "input_text", "text": WORDS}, picture]}
    answer = by_openai.responses.create(
        model=PICTURED, input=[user], max_output_tokens=NUM_TOKENS, temperature=0
    )
    assert answer.output_text == expected


def test_anthropics_messages(pictured: Pictured, expected: str) -> None:
    data = base64.b64encode(pictured.files[0]).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    parts = [{"type": "text", "text": WORDS}, {"type": "image", "source": source}]
    with anthropic.Anthropic(base_url=pictured.url, api_key="none", max_retries=0) as client:
        answer = client.messages.create(
            model=PICTURED,
            max_tokens=NUM_TOKENS,
            extra_body={"temperature": 0},
            messages=[{"role": "user", "content": parts}],
        )
    assert answer.content[0].text == expected


@pytest.mark.parametrize(("provider", "path"), [("openai", "/v1"), ("anthropic", "")])
def test_litellm(provider: str, path: str, pictured: Pictured, expected: str) -> None:
    answer = litellm.completion(
        model=f"{provider}/{PICTURED}",
        api_base=pictured.url + path,
        api_key="none",
        messages=[{"role": "user", "content": chat_parts(pictured.files[0])}],
        max_tokens=NUM_TOKENS,
        temperature=0,
    )
    assert answer.choices[0].message.content == expected


@pytest.mark.parametrize("through_responses", [False, True], ids=["chat", "responses"])
def test_langchain(through_responses: bool, pictured: Pictured, expected: str) -> None:
    """Its own form of a picture, which it turns into that of the API."""
    model = langchain_openai.ChatOpenAI(
        base_url=f"{pictured.url}/v1",
        api_key="none",
        model=PICTURED,
        max_tokens=NUM_TOKENS,
        temperature=0,
        use_responses_api=through_responses,
    )
    data = base64.b64encode(pictured.files[0]).decode()
    picture = {"type": "image", "base64": data, "mime_type": "image/png"}
    user = messages.HumanMessage(content=[{"type": "text", "text": WORDS}, picture])
    assert model.invoke([user]).text == expected
