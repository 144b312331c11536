"""Echo and prompt log probabilities through a real gateway: HTTP and gRPC."""

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import (
    inference_pb2_grpc,
    types_pb2,
)
from simulator.workers.prompt_outputs import logprob_of
from tests.gateway.http_calls import post, refusal, telling_logprobs
from wire.logprobs import LogprobColumns

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "The capital of France is Paris."
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
TURNS = {"messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture
def scheduler(running: Any) -> Any:
    """The module's scheduler; it sends log probabilities of the output, too."""

    def tell(ids: NDArray[np.int32], num_top: int) -> LogprobColumns:
        top = ids[:, None] + np.arange(num_top)
        return LogprobColumns(np.arange(len(ids)), *logprob_of(ids), top, logprob_of(top)[0])

    with telling_logprobs(running.scheduler, tell) as scheduler:
        yield scheduler


def numbers_of(token_ids: list[int]) -> tuple[list[float], list[int]]:
    logprobs, ranks = logprob_of(np.array(token_ids))
    return logprobs.tolist(), ranks.tolist()


async def test_echo_puts_the_prompt_in_front_of_the_text_and_of_the_columns(
    running: Any, scheduler: Any, encode: Any
) -> None:
    prompt = encode(TEXT)
    body = {"prompt": TEXT, "echo": True, "logprobs": 2, "max_tokens": 9}
    (choice,) = (await post(running, COMPLETIONS, body))["choices"]
    assert choice["text"] == TEXT + "Hello world"
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == TEXT + "Hello world"
    values, _ = numbers_of(prompt[1:] + scheduler.output)
    assert logprobs["token_logprobs"] == [None, *values]
    assert logprobs["top_logprobs"][0] is None
    assert all(2 <= len(tops) <= 3 for tops in logprobs["top_logprobs"][1:])
    offsets = logprobs["text_offset"]
    for offset, token in zip(offsets, logprobs["tokens"], strict=True):
        assert choice["text"].startswith(token, offset)
    assert {len(column) for column in logprobs.values()} == {len(prompt) + len(scheduler.output)}
    assert "prompt_logprobs" not in choice


@pytest.mark.parametrize("max_tokens", [0, 9])
async def test_a_stream_echoes_what_a_whole_answer_does(
    running: Any, scheduler: Any, max_tokens: int
) -> None:
    body = {"prompt": TEXT, "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    (whole,) = (await post(running, COMPLETIONS, body))["choices"]
    response = await running.http.post(COMPLETIONS, json=body | {"stream": True})
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert whole["text"] == TEXT + ("Hello world" if max_tokens else "")
    told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    joined = {name: [x for part in told for x in part[name]] for name in told[0]}
    assert joined == whole["logprobs"]


async def test_what_a_harness_sends_is_answered_as_it_expects(
    running: Any, scheduler: Any, encode: Any
) -> None:
    """Prompts of token ids, scored without an output."""
    prompts = [encode(TEXT), encode("Hello"), encode("naïve café")]
    body = {
        "model": "tiny",
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 0,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    scheduler.end = {"reason": types_pb2.FINISH_REASON_LENGTH}
    answer = await post(running, COMPLETIONS, body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        values, _ = numbers_of(prompt[1:])
        assert choice["logprobs"]["token_logprobs"] == [None, *values]
        assert choice["finish_reason"] == "length"
        for value, tops in zip(values, choice["logprobs"]["top_logprobs"][1:], strict=True):
            assert value in tops.values()
    assert answer["choices"][2]["text"] == "naïve café"
    assert answer["usage"]["completion_tokens"] == 0
    assert [submit.sampling.prompt_logprobs for submit in scheduler.submits] == [1, 1, 1]


async def test_echo_without_logprobs_asks_nothing_of_the_worker(
    running: Any, scheduler: Any
) -> None:
    body = {"prompt": TEXT, "echo": True, "max_tokens": 0}
    (choice,) = (await post(running, COMPLETIONS, body))["choices"]
    assert (choice["text"], choice["logprobs"]) == (TEXT, None)
    assert not scheduler.submits[0].sampling.HasField("prompt_logprobs")


async def test_every_choice_and_every_prompt_is_echoed(running: Any, scheduler: Any) -> None:
    body = {"prompt": ["Hello", TEXT], "n": 2, "echo": True, "logprobs": 0, "max_tokens": 9}
    choices = (await post(running, COMPLETIONS, body))["choices"]
    prompts = ["Hello", "Hello", TEXT, TEXT]
    assert [choice["text"] for choice in choices] == [f"{text}Hello world" for text in prompts]
    for choice in choices:
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert all(len(tops) == 1 for tops in choice["logprobs"]["top_logprobs"][1:])


def check_vllm_form(told: list[Any], prompt: list[int], num_top: int) -> None:
    assert told[0] is None
    values, ranks = numbers_of(prompt[1:])
    for tokens, token_id, value, rank in zip(told[1:], prompt[1:], values, ranks, strict=True):
        own = tokens[str(token_id)]
        assert own["logprob"] == value
        # The fake worker's likeliest token is the token itself, with its index as the rank.
        assert own["rank"] == (1 if num_top else rank)
        assert set(tokens) == {str(token_id + i) for i in range(max(num_top, 1))}
        assert all(set(one) == {"logprob", "rank", "decoded_token"} for one in tokens.values())


async def test_prompt_logprobs_have_the_form_of_vllm(
    running: Any, scheduler: Any, encode: Any
) -> None:
    asks = {"prompt_logprobs": 3}
    (choice,) = (await post(running, COMPLETIONS, {"prompt": TEXT, **asks}))["choices"]
    check_vllm_form(choice["prompt_logprobs"], encode(TEXT), 3)
    assert (choice["text"], choice["logprobs"]) == ("Hello world", None)
    answer = await post(running, CHATS, TURNS | {"prompt_logprobs": 0, "n": 2})
    check_vllm_form(answer["prompt_logprobs"], scheduler.prompt_of(1), 0)
    assert "prompt_logprobs" not in answer["choices"][0]


async def test_prompt_logprobs_and_echo_each_have_as_many_alternatives_as_asked(
    running: Any, scheduler: Any, encode: Any
) -> None:
    body = {"prompt": TEXT, "prompt_logprobs": 4, "echo": True, "logprobs": 2, "max_tokens": 0}
    (choice,) = (await post(running, COMPLETIONS, body))["choices"]
    check_vllm_form(choice["prompt_logprobs"], encode(TEXT), 4)
    assert all(len(tops) == 2 for tops in choice["logprobs"]["top_logprobs"][1:])
    assert scheduler.submits[0].sampling.prompt_logprobs == 4


async def test_a_prompt_of_one_token_has_no_numbers(running: Any, scheduler: Any) -> None:
    body = {"prompt": [5], "echo": True, "logprobs": 1, "prompt_logprobs": 1, "max_tokens": 0}
    (choice,) = (await post(running, COMPLETIONS, body))["choices"]
    assert choice["prompt_logprobs"] == [None]
    assert choice["logprobs"]["token_logprobs"] == [None]


@pytest.mark.parametrize(
    ("route", "field", "fields"),
    [
        (COMPLETIONS, "max_tokens", {"max_tokens": 0}),
        (CHATS, "max_tokens", {"max_tokens": 0}),
        (COMPLETIONS, "prompt_logprobs", {"prompt_logprobs": 21}),
        (COMPLETIONS, "prompt_logprobs", {"prompt_logprobs": -1}),
        (COMPLETIONS, "echo", {"echo": 1}),
    ],
)
async def test_a_question_that_cannot_be_asked_is_refused_by_name(
    running: Any, route: str, field: str, fields: dict[str, Any]
) -> None:
    base = TURNS if route == CHATS else {"prompt": TEXT}
    status, param, _ = await refusal(running, route, base | fields)
    assert (status, param) == (400, field)
    assert running.scheduler.submits == []


@pytest.mark.parametrize("spoil", ["gap", "short", "none"])
async def test_what_the_scheduler_leaves_out_is_its_fault(running: Any, spoil: str) -> None:
    plain = running.scheduler._answer

    def answer(submit: Any, outbox: Any) -> None:
        plain(submit, outbox)
        messages = [outbox.get_nowait() for _ in range(outbox.qsize())]
        told = [message for message in messages if message.prompt_outputs]
        dropped = {"gap": told[:1], "short": told[-1:], "none": told}[spoil]
        for message in messages:
            if message not in dropped:
                outbox.put_nowait(message)

    running.scheduler._answer = answer
    try:
        body = {"prompt": TEXT, "prompt_logprobs": 1}
        status, _, message = await refusal(running, COMPLETIONS, body)
    finally:
        del running.scheduler._answer
    assert (status, message.startswith("the scheduler reported")) == (500, True)


async def test_over_grpc_the_first_message_tells_of_the_prompt(
    running: Any, scheduler: Any, encode: Any
) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    prompt = encode(TEXT)
    sampling = types_pb2.SamplingParams(prompt_logprobs=2)
    options = pb.GenerationOptions(sampling=sampling)
    request = pb.GenerateStreamRequest(prompt=pb.Prompt(text=TEXT), options=options)
    first, *others = [message.delta async for message in stub.GenerateStream(request)]
    values, ranks = numbers_of(prompt[1:])
    assert list(first.prompt_token_ids) == prompt
    assert [token.logprob for token in first.prompt_logprobs] == values
    assert [token.rank for token in first.prompt_logprobs] == ranks
    assert all(len(token.top_token_ids) == 2 for token in first.prompt_logprobs)
    assert others and not any(delta.prompt_token_ids for delta in others)
    options.sampling.max_tokens = 0
    whole = await stub.Generate(pb.GenerateRequest(prompt=request.prompt, options=options))
    assert whole.output.prompt_logprobs == first.prompt_logprobs
    assert (whole.output.text, list(whole.output.token_ids)) == ("", [])
    assert whole.output.finish_reason == types_pb2.FINISH_REASON_STOP  # the fake scheduler's reason


async def test_a_scheduler_that_dies_is_not_asked_about_the_prompt_again(
    running: Any, encode: Any
) -> None:
    """Once there are tokens: the prompt's outputs arrive before them."""
    running.scheduler.output = encode(TEXT)
    running.scheduler.breaks_after = 4
    asks = {"prompt": "Hello world", "prompt_logprobs": 2}
    (choice,) = (await post(running, COMPLETIONS, asks))["choices"]
    check_vllm_form(choice["prompt_logprobs"], encode("Hello world"), 2)
    assert choice["text"] == TEXT
    first, *others = running.scheduler.submits
    assert first.sampling.HasField("prompt_logprobs") and others
    assert not any(submit.sampling.HasField("prompt_logprobs") for submit in others)
