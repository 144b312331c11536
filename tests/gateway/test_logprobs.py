"""Choices, log probabilities and sampling parameters through a real gateway: HTTP and gRPC."""

import json
import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc, scheduler_pb2, types_pb2
from tests.gateway.http_calls import post, telling_logprobs
from wire import columns
from wire.logprobs import LogprobColumns

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
PROMPT = {"prompt": "Hello"}


def logprob_of(token_id: int) -> float:
    return -token_id / 1024


@pytest.fixture
def scheduler(running: Any) -> Any:
    """The module's scheduler; its log probabilities name the next ids as alternatives."""

    def tell(ids: NDArray[np.int32], num_top: int) -> LogprobColumns:
        # More than requested, as when another request of the step asks for more.
        top = ids[:, None] + np.arange(num_top + 2)
        return LogprobColumns(np.arange(len(ids)), ids / -1024, ids + 1, top, top / -1024)

    with telling_logprobs(running.scheduler, tell) as scheduler:
        yield scheduler


async def stream(running: Any, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    response = await running.http.post(route, json=body)
    assert response.status_code == 200, response.text
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_a_chat_lists_every_token_with_its_bytes(
    running: Any, scheduler: Any, tokenizer: Any, encode: Any
) -> None:
    scheduler.output = encode("héllo 😀!")
    body = CHAT | {"logprobs": True, "top_logprobs": 2}
    answer = await post(running, "/v1/chat/completions", body)
    choice = answer["choices"][0]
    content = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    assert len(content) == len(scheduler.output)
    spelled = b"".join(bytes(token["bytes"]) for token in content)
    assert spelled.decode() == choice["message"]["content"] == "héllo 😀!"
    for token, token_id in zip(content, scheduler.output, strict=True):
        assert token["logprob"] == pytest.approx(logprob_of(token_id))
        assert [bytes(top["bytes"]) for top in token["top_logprobs"]] == [
            tokenizer.spell(token_id),
            tokenizer.spell(token_id + 1),
        ]
    # Incomplete characters are written as bytes, everything else as text.
    assert any(token["token"].startswith("bytes:\\x") for token in content)
    assert content[0]["token"] == bytes(content[0]["bytes"]).decode()


async def test_a_streamed_chat_has_the_same_tokens(running: Any, scheduler: Any) -> None:
    body = CHAT | {"logprobs": True}
    whole = await post(running, "/v1/chat/completions", body)
    chunks = await stream(running, "/v1/chat/completions", body)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    tokens = [t for c in choices if c["logprobs"] for t in c["logprobs"]["content"]]
    assert tokens == whole["choices"][0]["logprobs"]["content"]
    assert all(token["top_logprobs"] == [] for token in tokens)
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text == whole["choices"][0]["message"]["content"]


@pytest.mark.parametrize("count", [0, 3])
async def test_a_completion_has_columns_whose_offsets_point_into_its_text(
    count: int, running: Any, scheduler: Any, encode: Any
) -> None:
    scheduler.output = encode("naïve 日本 café")
    answer = await post(running, "/v1/completions", PROMPT | {"logprobs": count})
    choice = answer["choices"][0]
    table = choice["logprobs"]
    assert len({len(column) for column in table.values()}) == 1
    assert table["token_logprobs"] == pytest.approx([logprob_of(i) for i in scheduler.output])
    for token, offset in zip(table["tokens"], table["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert choice["text"][offset:].startswith(token)
    assert table["text_offset"] == sorted(table["text_offset"])
    for token, tops in zip(table["tokens"], table["top_logprobs"], strict=True):
        assert token in tops
        assert len(tops) <= max(count, 1)


async def test_a_stop_string_cuts_logprobs_with_the_tokens(
    running: Any, scheduler: Any, encode: Any
) -> None:
    scheduler.output = encode("The capital of France is Paris. And more.")
    body = PROMPT | {"logprobs": 0, "stop": "Paris"}
    choice = (await post(running, "/v1/completions", body))["choices"][0]
    assert choice["text"] == "The capital of France is "
    assert 0 < len(choice["logprobs"]["tokens"]) < len(scheduler.output)
    assert "".join(choice["logprobs"]["tokens"]).endswith("Paris")


NAMED = [400, 3, 5]


@pytest.fixture
def naming(running: Any) -> Any:
    """The module's scheduler; its alternatives are the tokens that a request names."""

    def tell(ids: NDArray[np.int32], num_top: int) -> LogprobColumns:
        named = list(running.scheduler.submits[-1].sampling.logprob_token_ids)
        top = np.tile(np.array([*named, 0], dtype=np.int32), (len(ids), 1))  # wider than asked
        return LogprobColumns(np.arange(len(ids)), ids / -1024, ids + 1, top, top / -1024)

    with telling_logprobs(running.scheduler, tell) as scheduler:
        yield scheduler


@pytest.mark.parametrize("names_sampled", [False, True])
async def test_a_chat_has_the_log_probabilities_of_the_token_and_of_named_ones(
    names_sampled: bool, running: Any, naming: Any, tokenizer: Any
) -> None:
    """At each position, whole and streamed, with any number of `top_logprobs`."""
    named = [*NAMED, *naming.output[:1]] if names_sampled else NAMED
    for fields in ({}, {"top_logprobs": 1}, {"top_logprobs": 20}):
        body = CHAT | {"logprobs": True, "logprob_token_ids": named} | fields
        choice = (await post(running, "/v1/chat/completions", body))["choices"][0]
        content = choice["logprobs"]["content"]
        assert len(content) == len(naming.output)
        for sampled, token in zip(naming.output, content, strict=True):
            told = [(bytes(top["bytes"]), top["logprob"]) for top in token["top_logprobs"]]
            expected = [sampled, *(i for i in named if i != sampled)]
            assert told == [(tokenizer.spell(i), pytest.approx(logprob_of(i))) for i in expected]
        chunks = await stream(running, "/v1/chat/completions", body)
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
        assert [token for one in choices for token in one["logprobs"]["content"]] == content


async def test_a_completion_has_them_by_name(running: Any, naming: Any) -> None:
    body = PROMPT | {"logprobs": 0, "logprob_token_ids": NAMED, "return_tokens_as_token_ids": True}
    table = (await post(running, "/v1/completions", body))["choices"][0]["logprobs"]
    for token_id, tops in zip(naming.output, table["top_logprobs"], strict=True):
        expected = {f"token_id:{i}": logprob_of(i) for i in (token_id, *NAMED)}
        assert tops == pytest.approx(expected)


async def test_grpc_has_them_in_the_order_of_the_request(running: Any, naming: Any) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    sampling = types_pb2.SamplingParams(logprobs=0, logprob_token_ids=NAMED)
    options = pb.GenerationOptions(sampling=sampling)
    whole = await stub.Generate(pb.GenerateRequest(prompt=pb.Prompt(text="Hello"), options=options))
    assert len(whole.output.logprobs) == len(naming.output)
    assert all(list(token.top_token_ids) == NAMED for token in whole.output.logprobs)


async def test_a_scheduler_that_ignores_named_tokens_is_an_error_and_not_a_lie(
    running: Any, scheduler: Any
) -> None:
    body = CHAT | {"logprobs": True, "logprob_token_ids": NAMED}
    response = await running.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 500
    assert "logprob_token_ids" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"logprob_token_ids": [5]},  # without logprobs
        {"logprob_token_ids": [5], "best_of": 2},
        {"logprobs": True, "logprob_token_ids": [99999]},
        {"logprobs": True, "logprob_token_ids": [-1]},
        {"logprobs": True, "logprob_token_ids": [5] * 129},
        {"logprobs": True, "logprob_token_ids": [5], "max_tokens": 0, "prompt_logprobs": 1},
        {"logprobs": True, "logprob_token_ids": [5], "use_beam_search": True, "best_of": 2},
    ],
)
async def test_named_tokens_that_cannot_be_told_are_refused(
    fields: dict[str, Any], running: Any
) -> None:
    for route, body in (("/v1/chat/completions", CHAT), ("/v1/completions", PROMPT)):
        response = await running.http.post(route, json=body | fields)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == "logprob_token_ids"
    assert running.scheduler.submits == []


async def test_grpc_outputs_have_one_entry_per_token(running: Any, scheduler: Any) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    options = pb.GenerationOptions(sampling=types_pb2.SamplingParams(logprobs=1))
    prompt = pb.Prompt(text="Hello")
    whole = await stub.Generate(pb.GenerateRequest(prompt=prompt, options=options))
    pieces = stub.GenerateStream(pb.GenerateStreamRequest(prompt=prompt, options=options))
    deltas = [message.delta async for message in pieces]
    streamed = [token for delta in deltas for token in delta.logprobs]
    assert list(whole.output.logprobs) == streamed
    for token, token_id in zip(streamed, scheduler.output, strict=True):
        assert token.logprob == pytest.approx(logprob_of(token_id))
        assert (token.rank, list(token.top_token_ids)) == (token_id + 1, [token_id])
    total = pytest.approx(sum(map(logprob_of, scheduler.output)))
    assert whole.output.cumulative_logprob == deltas[-1].cumulative_logprob == total
    assert not any(delta.HasField("cumulative_logprob") for delta in deltas[:-1])


async def test_after_resumed_tokens_there_is_no_sum(running: Any, scheduler: Any) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    options = pb.GenerationOptions(
        sampling=types_pb2.SamplingParams(logprobs=1), resume_token_ids=scheduler.output[:1]
    )
    request = pb.GenerateStreamRequest(prompt=pb.Prompt(text="Hello"), options=options)
    deltas = [message.delta async for message in stub.GenerateStream(request)]
    assert any(delta.logprobs for delta in deltas)
    assert not deltas[-1].HasField("cumulative_logprob")


async def test_a_scheduler_that_sends_no_logprobs_is_an_error_and_not_a_lie(running: Any) -> None:
    response = await running.http.post("/v1/completions", json=PROMPT | {"logprobs": 1})
    assert response.status_code == 500
    assert "logprobs" in response.json()["error"]["message"]


async def test_n_gives_indexed_choices_and_counts_the_prompt_once(running: Any) -> None:
    body = {"prompt": ["Hello", "world"], "n": 3, "seed": 8}
    answer = await post(running, "/v1/completions", body)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    submits = running.scheduler.submits
    by_prompt: dict[bytes, list[int]] = {}
    for submit in submits:
        by_prompt.setdefault(submit.prompt_token_ids, []).append(submit.sampling.seed)
    assert len(by_prompt) == 2
    assert all(len(set(seeds)) == 3 and 8 in seeds for seeds in by_prompt.values())
    num_output = len(running.scheduler.output)
    num_prompt = sum(len(ids) // 4 for ids in by_prompt)
    assert answer["usage"]["prompt_tokens"] == num_prompt
    assert answer["usage"]["completion_tokens"] == 6 * num_output
    chunks = await stream(running, "/v1/completions", body)
    assert chunks[-1]["usage"] == answer["usage"]
    texts = ["" for _ in range(6)]
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in answer["choices"]]


@pytest.mark.parametrize("name", ["Generate", "Chat"])
async def test_n_in_grpc_gives_indexed_outputs(name: str, running: Any) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    options = pb.GenerationOptions(n=3, request_id="mine")
    if name == "Generate":
        request: Any = {"prompt": pb.Prompt(text="Hello"), "options": options}
    else:
        turn = pb.ChatMessage(role="user", content="Hello")
        request = {"messages": [turn], "options": options}
    whole = await getattr(stub, name)(getattr(pb, f"{name}Request")(**request))
    outputs = [whole.output, *whole.more_outputs]
    assert [output.index for output in outputs] == [0, 1, 2]
    assert {output.text for output in outputs} == {"Hello world"}
    assert whole.request_id == "mine"
    texts, ends = ["", "", ""], [0, 0, 0]
    call = getattr(stub, f"{name}Stream")(getattr(pb, f"{name}StreamRequest")(**request))
    async for message in call:
        texts[message.delta.index] += message.delta.text
        ends[message.delta.index] += message.delta.HasField("usage")
    assert texts == ["Hello world"] * 3 and ends == [1, 1, 1]


async def test_rules_reach_the_scheduler_as_they_are(running: Any, encode: Any) -> None:
    body = CHAT | {
        "presence_penalty": 0.5,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "logit_bias": {"5": -100, "7": 2.5},
        "allowed_token_ids": [5, 6],
        "bad_words": ["world", " Paris"],
    }
    await post(running, "/v1/chat/completions", body)
    sampling = running.scheduler.submits[0].sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -1)
    assert sampling.repetition_penalty == 1.5
    assert {entry.token_id: entry.bias for entry in sampling.logit_bias} == {5: -100, 7: 2.5}
    assert list(sampling.allowed_token_ids) == [5, 6]
    words = [list(word.token_ids) for word in sampling.bad_words_token_ids]
    assert words == [encode(text) for text in ("world", " world", "Paris", " Paris")]
    await post(running, "/v1/completions", PROMPT)
    plain = running.scheduler.submits[1].sampling
    assert [field.name for field, _ in plain.ListFields()] == ["max_tokens"]


async def test_bad_words_over_grpc_are_strings_beside_token_ids(running: Any, encode: Any) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    word = types_pb2.TokenSequence(token_ids=[4, 4])
    sampling = types_pb2.SamplingParams(bad_words_token_ids=[word])
    options = pb.GenerationOptions(sampling=sampling, bad_words=["world"])
    await stub.Generate(pb.GenerateRequest(prompt=pb.Prompt(text="Hello"), options=options))
    sent = running.scheduler.submits[0].sampling.bad_words_token_ids
    assert [list(w.token_ids) for w in sent] == [[4, 4], encode("world"), encode(" world")]


REFUSALS = [
    ("n", {"n": 0}),
    ("n", {"n": 129}),
    ("presence_penalty", {"presence_penalty": 2.5}),
    ("frequency_penalty", {"frequency_penalty": -2.5}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("logit_bias", {"logit_bias": {"x": 1}}),
    ("logit_bias", {"logit_bias": {"1": "x"}}),
    ("logit_bias", {"logit_bias": {"1": True}}),
    ("logit_bias", {"logit_bias": {"1": 101}}),
    ("logit_bias", {"logit_bias": {"1": 1, "01": 1}}),
    ("logit_bias", {"logit_bias": {"99999": 1}}),
    ("logit_bias", {"logit_bias": [1]}),
    ("logit_bias", {"logit_bias": {str(i): 1 for i in range(1025)}}),
    ("allowed_token_ids", {"allowed_token_ids": [-1]}),
    ("allowed_token_ids", {"allowed_token_ids": [99999]}),
    ("bad_words", {"bad_words": ["x"] * 129}),
    ("bad_words[1]", {"bad_words": ["x", " "]}),
    ("bad_words[0]", {"bad_words": ["x" * 1025]}),
]


@pytest.mark.parametrize(("field", "fields"), REFUSALS)
async def test_what_is_out_of_range_is_refused_by_name(
    field: str, fields: dict[str, Any], running: Any
) -> None:
    for route, body in (("/v1/chat/completions", CHAT), ("/v1/completions", PROMPT)):
        response = await running.http.post(route, json=body | fields)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == field
    assert running.scheduler.submits == []


@pytest.mark.parametrize(
    ("route", "field", "fields"),
    [
        ("/v1/chat/completions", "top_logprobs", {"top_logprobs": 3}),
        ("/v1/chat/completions", "top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("/v1/chat/completions", "logprobs", {"logprobs": 1}),
        ("/v1/completions", "logprobs", {"logprobs": 21}),
        ("/v1/completions", "logprobs", {"logprobs": "1"}),
    ],
)
async def test_logprobs_out_of_range_are_refused_by_name(
    route: str, field: str, fields: dict[str, Any], running: Any
) -> None:
    body = CHAT if "chat" in route else PROMPT
    response = await running.http.post(route, json=body | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


async def test_an_impossible_token_is_still_json(running: Any, scheduler: Any) -> None:
    scheduler.output = [5]

    def answer(submit: Any, outbox: Any) -> None:
        one = np.zeros(1, dtype=np.int32)
        infinite = np.full(1, -math.inf, dtype=np.float32)
        none = np.zeros((1, 0), dtype=np.int32)
        numbers = LogprobColumns(one, infinite, one + 9, none, none.astype(np.float32))
        handles = columns.pack([submit.handle], columns.UINT32)
        message = types_pb2.LogprobColumns(**numbers.pack())
        outbox.put_nowait(
            scheduler_pb2.SessionResponse(
                handles=handles, token_ids=columns.pack([5]), logprobs=message
            )
        )
        scheduler._finish(submit, outbox)

    scheduler._answer = answer
    answered = await post(running, "/v1/completions", PROMPT | {"logprobs": 0})
    assert answered["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]
