"""Every limit accepts its value and refuses one more, naming the field."""

from collections.abc import Callable

import pytest

from gateway.chat.conversation import Conversation, Message
from gateway.errors import limits
from gateway.errors.request_errors import ErrorKind, RequestError
from gateway.http.anthropic.blocks import validated
from gateway.http.schema import ChatCompletionBody, CompletionBody
from gateway.request.choices import MAX_CHOICES, expand
from gateway.request.generation import (
    MAX_LOGPROBS,
    GenerationRequest,
    SamplingParams,
    check_token_ids,
)

VOCAB_SIZE = 1000


def request(**values: object) -> GenerationRequest:
    return GenerationRequest(**({"request_id": "a", "prompt": "b"} | values))


def conversation(count: int, role: str = "user") -> Conversation:
    return Conversation((Message(role, "x"),) * count)


def chat_with_parts(count: int) -> ChatCompletionBody:
    parts = [{"type": "text", "text": "x"}] * count
    return ChatCompletionBody.model_validate({"messages": [{"role": "user", "content": parts}]})


def chat(count: int) -> ChatCompletionBody:
    messages = [{"role": "user", "content": "x"}] * count
    return ChatCompletionBody.model_validate({"messages": messages})


def chat_with(**fields: object) -> Conversation:
    body = {"messages": [{"role": "user", "content": "x"}]} | fields
    request, *_ = validated(ChatCompletionBody, body, "").to_requests("a")
    assert isinstance(request.prompt, Conversation)
    return request.prompt


def tool(name: str) -> dict[str, object]:
    return {"type": "function", "function": {"name": name}}


def calling(count: int, name: str = "f") -> Conversation:
    function = {"name": name, "arguments": "{}"}
    calls = [{"id": "1", "type": "function", "function": function}] * count
    return chat_with(messages=[{"role": "assistant", "tool_calls": calls}])


COUNTED: list[tuple[str, int, Callable[[int], object]]] = [
    ("request_id", limits.MAX_REQUEST_ID_BYTES, lambda n: request(request_id="a" * n)),
    ("request_id", limits.MAX_REQUEST_ID_BYTES, lambda n: request(request_id="a" * (n - 2) + "é")),
    ("stop", limits.MAX_STOP_STRINGS, lambda n: request(stop=("x",) * n)),
    ("stop[0]", limits.MAX_STOP_STRING_BYTES, lambda n: request(stop=("x" * n,))),
    ("stop[1]", limits.MAX_STOP_STRING_BYTES, lambda n: request(stop=("x", "é" + "x" * (n - 2)))),
    ("messages", limits.MAX_MESSAGES, conversation),
    ("messages", limits.MAX_MESSAGES, chat),
    ("messages[0].role", limits.MAX_ROLE_BYTES, lambda n: conversation(1, "r" * n)),
    ("messages[0].content", limits.MAX_CONTENT_PARTS, chat_with_parts),
    ("messages[0].tool_calls", limits.MAX_TOOL_CALLS, calling),
    (
        "messages[0].tool_calls[0].function.name",
        limits.MAX_TOOL_NAME_BYTES,
        lambda n: calling(1, "f" * n),
    ),
    ("tools", limits.MAX_TOOLS, lambda n: chat_with(tools=[tool(f"f{i}") for i in range(n)])),
    (
        "tools[0].function.name",
        limits.MAX_TOOL_NAME_BYTES,
        lambda n: chat_with(tools=[tool("f" * n)]),
    ),
    ("documents", limits.MAX_DOCUMENTS, lambda n: chat_with(documents=[{"text": "x"}] * n)),
    (
        "chat_template_kwargs",
        limits.MAX_TEMPLATE_KWARGS,
        lambda n: chat_with(chat_template_kwargs={f"k{i}": 1 for i in range(n)}),
    ),
    (
        "prompt",
        limits.MAX_PROMPTS,
        lambda n: CompletionBody.model_validate({"prompt": ["x"] * n}),
    ),
    ("n", MAX_CHOICES, lambda n: expand(request(), n)),
    ("top_logprobs", MAX_LOGPROBS, lambda n: chat_with(logprobs=True, top_logprobs=n)),
    (
        "logprobs",
        MAX_LOGPROBS,
        lambda n: SamplingParams(num_top_logprobs=n).check(VOCAB_SIZE),
    ),
    (
        "logit_bias",
        limits.MAX_LOGIT_BIASES,
        lambda n: chat_with(logit_bias={str(i): 1 for i in range(n)}),
    ),
    (
        "allowed_token_ids",
        limits.MAX_ALLOWED_TOKEN_IDS,
        lambda n: SamplingParams(allowed_token_ids=(1,) * n).check(VOCAB_SIZE),
    ),
    ("bad_words", limits.MAX_BAD_WORDS, lambda n: request(bad_words=("x",) * n)),
    ("bad_words[0]", limits.MAX_BAD_WORD_BYTES, lambda n: request(bad_words=("x" * n,))),
    (
        "stop_token_ids",
        limits.MAX_STOP_TOKEN_IDS,
        lambda n: SamplingParams(stop_token_ids=(1,) * n).check(VOCAB_SIZE),
    ),
]


@pytest.mark.parametrize(("field", "limit", "make"), COUNTED)
def test_a_limit_holds_at_its_value_and_refuses_one_more(
    field: str, limit: int, make: Callable[[int], object]
) -> None:
    make(limit)
    with pytest.raises(RequestError, match=str(limit)) as refusal:
        make(limit + 1)
    assert refusal.value.field == field
    assert refusal.value.message.startswith(f"{field}: ")


GOOD = [
    {"temperature": 0},
    {"temperature": 2.0},
    {"top_p": 1e-9},
    {"top_p": 1},
    {"top_k": -1},
    {"top_k": 0},
    {"top_k": 2**31 - 1},
    {"min_p": 0},
    {"min_p": 1},
    {"seed": 0},
    {"seed": 2**64 - 1},
    {"max_tokens": 1},
    {"max_tokens": 5, "min_tokens": 5},
    {"min_tokens": 0},
    {"stop_token_ids": (0, VOCAB_SIZE - 1)},
]
BAD = [
    ("temperature", {"temperature": -0.001}),
    ("temperature", {"temperature": 2.001}),
    ("temperature", {"temperature": float("nan")}),
    ("temperature", {"temperature": float("inf")}),
    ("temperature", {"temperature": 10**400}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": 1.001}),
    ("top_k", {"top_k": -2}),
    ("top_k", {"top_k": 2**31}),
    ("min_p", {"min_p": -0.001}),
    ("min_p", {"min_p": 1.001}),
    ("seed", {"seed": -1}),
    ("seed", {"seed": 2**64}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": 2**32}),
    ("min_tokens", {"min_tokens": -1}),
    ("min_tokens", {"min_tokens": 6, "max_tokens": 5}),
    ("stop_token_ids", {"stop_token_ids": (VOCAB_SIZE,)}),
    ("stop_token_ids", {"stop_token_ids": (-1,)}),
]


@pytest.mark.parametrize("values", GOOD)
def test_a_value_at_the_edge_of_its_range_is_accepted(values: dict[str, object]) -> None:
    SamplingParams(**values).check(VOCAB_SIZE)


@pytest.mark.parametrize(("field", "values"), BAD)
def test_a_value_outside_its_range_is_refused_by_name(
    field: str, values: dict[str, object]
) -> None:
    with pytest.raises(RequestError) as refusal:
        SamplingParams(**values).check(VOCAB_SIZE)
    assert (refusal.value.kind, refusal.value.field) == (ErrorKind.INVALID, field)


@pytest.mark.parametrize("make", [lambda: request(stop=("",)), lambda: Conversation(())])
def test_emptiness_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(RequestError, match="is empty"):
        make()


def test_ids_outside_the_vocabulary_are_refused() -> None:
    check_token_ids("prompt", (0, 9), 10)
    for ids in ((0, 10), (-1, 3)):
        with pytest.raises(RequestError, match="outside the vocabulary of 10"):
            check_token_ids("prompt", ids, 10)


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(RequestError, match="surrogate"):
        request(stop=("\ud800",))
