"""Checks docs/api.md by sending every field to a running gateway."""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai.types import chat, completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from gateway.http import fields
from gateway.http.anthropic.body import CountBody, MessagesBody
from gateway.http.cohere.chat_body import CohereChatBody
from gateway.http.cohere.embed_body import EmbedBody
from gateway.http.embeddings import EmbeddingBody
from gateway.http.messages import ChatMessage
from gateway.http.pooling.routes import PoolingBody
from gateway.http.response_body import ResponseBody
from gateway.http.routes.tokens import FIELDS_OF_CONVERSATIONS, DetokenizeBody, TokenizeBody
from gateway.http.schema import ChatCompletionBody, CompletionBody
from gateway.http.scoring.bodies import RerankBody, ScoreBody
from pagewire.v1 import types_pb2
from tests.gateway.http_calls import telling_logprobs
from wire.logprobs import LogprobColumns

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
EMBEDDING, MESSAGES = "/v1/embeddings", "/v1/messages"
RERANK, SCORE = "/v1/rerank", "/v1/score"
COHERE_CHAT, COHERE_EMBED, POOLING = "/v2/chat", "/v2/embed", "/pooling"
TOKENIZE, DETOKENIZE, COUNT = "/tokenize", "/detokenize", "/v1/messages/count_tokens"
TURNS = "turns"
ROUTES_OF = {
    "Both routes": (CHAT, COMPLETION),
    CHAT: (CHAT,),
    COMPLETION: (COMPLETION,),
    RESPONSE: (RESPONSE,),
    EMBEDDING: (EMBEDDING,),
    MESSAGES: (MESSAGES,),
    COHERE_CHAT: (COHERE_CHAT,),
    COHERE_EMBED: (COHERE_EMBED,),
    POOLING: (POOLING,),
    RERANK: (RERANK,),
    SCORE: (SCORE,),
    TOKENIZE: (TOKENIZE,),
    DETOKENIZE: (DETOKENIZE,),
    "Turns of `messages": (TURNS,),
    "Beam search": (),  # words, without a table of fields
    "Streams that wait": (),
    "Token ids in and out": (),
    "Responses in the background": (),
}
TURN = {"role": "user", "content": "Hello"}
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [TURN]},
    COMPLETION: {"prompt": "Hello"},
    RESPONSE: {"input": "Hello"},
    EMBEDDING: {"input": "Hello"},
    MESSAGES: {"messages": [TURN]},
    COHERE_CHAT: {"messages": [TURN]},
    COHERE_EMBED: {"texts": ["Hello"]},
    POOLING: {"input": "Hello", "task": "embed"},
    RERANK: {"query": "Hello", "documents": ["a"]},
    SCORE: {"text_1": "Hello", "text_2": "a"},
    TOKENIZE: {"prompt": "Hello"},
    DETOKENIZE: {"tokens": [5]},
    COUNT: {"messages": [TURN]},
}
BODIES: dict[str, Any] = {
    CHAT: ChatCompletionBody,
    COMPLETION: CompletionBody,
    RESPONSE: ResponseBody,
    EMBEDDING: EmbeddingBody,
    MESSAGES: MessagesBody,
    COHERE_CHAT: CohereChatBody,
    COHERE_EMBED: EmbedBody,
    POOLING: PoolingBody,
    RERANK: RerankBody,
    SCORE: ScoreBody,
    TOKENIZE: TokenizeBody,
    DETOKENIZE: DetokenizeBody,
    COUNT: CountBody,
}
RANDOM = random.Random(18)
# A field that is valid only together with another one.
TOOLS = [{"type": "function", "function": {"name": "f"}}]
COMPANIONS = {
    "guided_whitespace_pattern": {"guided_json": {}},
    "top_logprobs": {"logprobs": True},
    "logprob_token_ids": {"logprobs": True},
    "stream_options": {"stream": True},
    "tool_choice": {"tools": TOOLS},
    "use_beam_search": {"max_tokens": 2},
    "early_stopping": {"use_beam_search": True, "max_tokens": 2},
    "length_penalty": {"use_beam_search": True, "max_tokens": 2},
}
# Values of supported fields that ask for nothing.
DEFAULTS: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "encoding_format": ("float",),
    "frequency_penalty": (0, 0.0),
    "ignore_eos": (False,),
    "include": ([],),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "logit_bias": ({},),
    "logprob_token_ids": ([],),
    "logprobs": (False,),
    "max_completion_tokens": (-1,),
    "max_output_tokens": (-1,),
    "max_tokens": (-1,),
    "metadata": ({},),
    "min_p": (0, 0.0),
    "min_tokens": (0,),
    "n": (1,),
    "normalize": (True,),
    "output_config": ({},),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0, 0.0),
    "priority": (0,),
    "reasoning": ({},),
    "repetition_penalty": (1, 1.0),
    "response_format": ({"type": "text"},),
    "return_documents": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "seed": (-1,),
    "skip_prefix_cache": (False,),
    "skip_speculation": (False,),
    "skip_special_tokens": (True,),
    "stop": ([],),
    "stop_sequences": ([],),
    "stop_token_ids": ([],),
    "store": (False,),
    "stream": (False,),
    "stream_options": ({},),
    "structured_outputs": ({},),
    "system": ("", []),
    "temperature": (1, 1.0),
    "text": ({}, {"format": {"type": "text"}}),
    "thinking_token_budget": (-1,),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "top_k": (-1, 0),
    "top_logprobs": (0,),
    "top_p": (1, 1.0),
    "truncate_prompt_tokens": (-1,),
    "truncation_side": ("left", "right"),
    "use_beam_search": (False,),
    "user": ("",),
}
# What a route calls by another name.
REPLACES = {"queries": "text_1", "documents": "text_2"}
LINE = re.compile(
    r"\| `(?P<field>\w+)` \| (?P<status>\w+) \| `(?P<example>.+?)` \| (?P<note>.*) ?\|"
)


@dataclass(frozen=True, slots=True)
class Line:
    """The documented support of one field on one route."""

    route: str
    field: str
    status: str
    example: Any
    note: str


def read_table() -> Iterator[Line]:
    routes: tuple[str, ...] = ()
    path = Path(__file__).parents[3] / "docs" / "api.md"
    for text in path.read_text().splitlines():
        if text.startswith("## "):
            routes = ROUTES_OF[text.removeprefix("## ").strip("`")]
        elif text.startswith("| `"):
            line = LINE.fullmatch(text)
            assert line is not None, text
            example = json.loads(line["example"])
            for route in routes:
                yield Line(route, line["field"], line["status"], example, line["note"].strip())


ALL_LINES = list(read_table())
LINES = [line for line in ALL_LINES if line.route != TURNS]
TURN_LINES = [line for line in ALL_LINES if line.route == TURNS]
# vLLM's fields in addition to OpenAI's: of chats and completions, and of the other routes.
VLLM_FIELDS = """
    add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template
    chat_template_kwargs continue_final_message detokenize documents ec_transfer_params echo
    extra_args ignore_eos include_reasoning include_stop_str_in_output kv_transfer_params
    length_penalty logits_processors logprob_token_ids media_io_kwargs min_p min_tokens
    mm_processor_kwargs priority prompt_embeds prompt_logprobs reasoning_effort
    repetition_detection repetition_penalty request_id response_format return_mm_kwargs
    return_prompt_text return_token_ids return_token_offsets return_tokens_as_token_ids
    routed_experts_prompt_start session_id skip_special_tokens spaces_between_special_tokens
    stop_token_ids stream_interval structured_outputs thinking_token_budget top_k
    truncate_prompt_tokens truncation_side use_beam_search vllm_xargs watermarking
"""

VLLM_POOLING = """
    cache_salt chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs priority
    request_id truncate_prompt_tokens truncation_side use_activation user
"""
VLLM_RENDERING = """
    add_generation_prompt add_special_tokens chat_template chat_template_kwargs
    continue_final_message media_io_kwargs messages mm_processor_kwargs
"""
VLLM_OTHERS = {
    (RESPONSE,): """
        cache_salt chat_template_kwargs ec_transfer_params enable_response_messages
        frequency_penalty ignore_eos include_stop_str_in_output kv_transfer_params logit_bias
        media_io_kwargs mm_processor_kwargs presence_penalty previous_input_messages priority
        repetition_penalty request_id seed session_id skip_special_tokens stop structured_outputs
        top_k vllm_xargs watermarking
    """,
    (EMBEDDING,): f"{VLLM_POOLING} {VLLM_RENDERING} embed_dtype endianness",
    (RERANK,): f"{VLLM_POOLING} documents instruction max_tokens_per_doc query top_n",
    (SCORE,): f"{VLLM_POOLING} documents instruction max_tokens_per_doc queries text_1 text_2",
    (TOKENIZE,): f"{VLLM_RENDERING} prompt return_token_strs tools",
    (DETOKENIZE,): "tokens",
}


@pytest.fixture(scope="module")
def model_info(model_info: types_pb2.ModelInfo) -> types_pb2.ModelInfo:
    model_info.max_model_len = 4096  # the question of a score is long
    return model_info


@pytest.fixture(autouse=True)
def scheduler(running: Any) -> Iterator[None]:
    """Hides requests for logprobs from the fake scheduler, which would send none."""
    plain = type(running.scheduler)._answer

    def tell(ids: Any, num_top: int) -> LogprobColumns:
        one, none = np.zeros(1, np.int32), np.zeros((1, num_top), np.int32)
        return LogprobColumns(one, one - np.float32(1), one + 1, none, none.astype(np.float32))

    def answer(submit: Any, outbox: Any) -> None:
        if list(submit.sampling.allowed_token_ids) and submit.sampling.max_tokens == 1:  # a score
            running.scheduler.output = list(submit.sampling.allowed_token_ids)
            with telling_logprobs(running.scheduler, tell):
                running.scheduler._answer(submit, outbox)
            running.scheduler._answer = answer
            return
        if submit.sampling.logprobs and submit.sampling.ignore_eos:  # a round of a beam search
            running.scheduler.output = [5]
            with telling_logprobs(running.scheduler, tell):
                running.scheduler._answer(submit, outbox)
            running.scheduler._answer = answer
            return
        if submit.sampling.HasField("logprobs"):
            running.scheduler.output = []
        plain(running.scheduler, submit, outbox)

    running.scheduler._answer = answer
    yield
    del running.scheduler._answer


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.route}-{line.field}")
async def test_the_gateway_does_what_the_table_says(line: Line, running: Any) -> None:
    base = BASE[line.route] | COMPANIONS.get(line.field, {})
    if line.route == SCORE:
        base.pop(REPLACES.get(line.field, ""), None)
    if line.route == COHERE_EMBED and line.field == "inputs":
        base = {}
    if line.route == MESSAGES and line.field == "tool_choice":
        base = BASE[line.route]
    if line.route == RESPONSE and line.field == "tool_choice":
        base["tools"] = [{"type": "function", "name": "f"}]
    if line.route == TOKENIZE and line.field in ("messages", *FIELDS_OF_CONVERSATIONS):
        base = {"messages": [TURN]}
    response = await running.http.post(line.route, json=base | {line.field: line.example})
    if line.status in ("refused", "option"):
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["param"], error["code"]) == (line.field, "unsupported_parameter")
        return
    assert response.status_code == 200, response.text
    if line.status == "ignored":
        plain = await running.http.post(line.route, json=base)
        if line.route in (TOKENIZE, DETOKENIZE):
            assert response.json() == plain.json()
            return
        submits = running.scheduler.submits  # as many each time
        with_it, without = submits[0], submits[len(submits) // 2]
        assert with_it.sampling == without.sampling
        assert with_it.prompt_token_ids == without.prompt_token_ids


@pytest.mark.parametrize(
    ("route", "theirs"),
    [
        (CHAT, chat_create_params.CompletionCreateParamsBase),
        (COMPLETION, completion_create_params.CompletionCreateParamsBase),
        (RESPONSE, response_create_params.ResponseCreateParamsBase),
        (EMBEDDING, embedding_create_params.EmbeddingCreateParams),
        (MESSAGES, None),  # the package is in the environment of tests/clients
        (COHERE_CHAT, None),
        (COHERE_EMBED, None),
        (POOLING, None),
        (RERANK, None),
        (SCORE, None),
        (TOKENIZE, None),
        (DETOKENIZE, None),
    ],
)
async def test_the_table_has_every_field_of_the_gateway_and_of_openai(
    route: str, theirs: Any
) -> None:
    body = BODIES[route]
    mine = [line for line in LINES if line.route == route]
    by_status: dict[str, set[str]] = {}
    for line in mine:
        by_status.setdefault(line.status, set()).add(line.field)
    assert len({line.field for line in mine}) == len(mine)
    assert set(by_status) <= {"supported", "different", "ignored", "refused", "option"}
    built = {line.field for line in mine if line.status in ("supported", "different", "option")}
    assert built == set(body.model_fields)
    assert by_status["ignored"] == set(body.harmless) - set(body.model_fields)
    assert by_status.get("refused", set()) == set(body.neutral)
    if theirs is not None:
        assert set(theirs.__annotations__) <= {line.field for line in mine}


def _defaults(route: str, name: str) -> tuple[Any, ...]:
    """The values of a supported field that ask for nothing."""
    if (route, name) == (MESSAGES, "max_tokens") or (route == SCORE and name in REPLACES):
        return ()  # Anthropic has no -1; two names of one text contradict each other
    if route in (COHERE_EMBED, COHERE_CHAT) and name in ("max_tokens", "tool_choice"):
        return ()  # null alone
    if name == "tool_choice" and route in (MESSAGES, COUNT):
        return ({"type": "auto"}, {"type": "none"})
    return DEFAULTS.get(name, ())


@pytest.mark.parametrize("route", BODIES)
async def test_no_known_field_is_refused_where_it_asks_for_nothing(
    route: str, running: Any
) -> None:
    body = BODIES[route]
    nothing: list[dict[str, Any]] = [{name: None} for name in body.model_fields]
    nothing += [{name: value} for name in body.neutral for value in (None, *body.neutral[name])]
    nothing += [{name: value} for name in body.model_fields for value in _defaults(route, name)]
    nothing += [{name: value} for name in body.harmless for value in (None, 1, "a", {"b": [2]})]
    nothing = [fields for fields in nothing if not fields.keys() & BASE[route].keys()]
    for asked in [*_several_at_once(nothing), *_several_at_once(nothing)]:
        if route == RESPONSE and isinstance(asked.get("metadata"), (int, str)):
            del asked["metadata"]  # it is part of the answer there
        if isinstance(asked.get("metadata"), dict) and route == RESPONSE:
            asked = asked | {"metadata": {"b": "2"}}
        response = await running.http.post(route, json=BASE[route] | asked)
        assert response.status_code == 200, (asked, response.text)
        assert "x-pagewire-warning" not in response.headers, asked


def _several_at_once(fields: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Bodies that have all of these fields, a dozen in each: a refusal names its own."""
    bodies: list[dict[str, Any]] = []
    for field in RANDOM.sample(fields, len(fields)):
        free = (body for body in bodies if len(body) < 12 and not field.keys() & body.keys())
        body = next(free, None)
        if body is None:
            bodies.append(body := {})
        body.update(field)
    return bodies


async def test_what_is_different_says_how() -> None:
    assert all(line.note for line in LINES if line.status in ("different", "ignored"))


async def test_what_is_refused_says_why() -> None:
    """In words, next to the values that are accepted."""
    for line in ALL_LINES:
        if line.status == "refused":
            reason = re.sub(r"off: (0|`[^`]*`)(, `[^`]*`)*[;:]?", "", line.note)
            assert re.search(r"[a-z]{2}", reason), (line.route, line.field)


async def test_the_table_has_every_field_of_vllm() -> None:
    for routes, theirs in (((CHAT, COMPLETION), VLLM_FIELDS), *VLLM_OTHERS.items()):
        mine = {line.field for line in LINES if line.route in routes}
        assert not set(theirs.split()) - mine, routes


@pytest.mark.parametrize("line", TURN_LINES, ids=lambda line: line.field)
async def test_turns_are_taken_as_the_table_says(line: Line, running: Any) -> None:
    turn = TURN | {line.field: line.example}
    response = await running.http.post(CHAT, json={"messages": [turn]})
    if line.status != "refused":
        assert response.status_code == 200, response.text
        return
    assert response.status_code == 400
    error = response.json()["error"]
    expected = (f"messages[0].{line.field}", "unsupported_parameter")
    assert (error["param"], error["code"]) == expected


async def test_the_table_has_every_field_of_the_turns_of_openai() -> None:
    theirs: set[str] = set()
    for name in dir(chat):
        if name.startswith("ChatCompletion") and name.endswith("MessageParam"):
            theirs |= set(getattr(getattr(chat, name), "__annotations__", ()))
    assert {"role", "content", "tool_calls", "refusal"} <= theirs
    assert theirs <= {line.field for line in TURN_LINES}
    by_status: dict[str, set[str]] = {}
    for line in TURN_LINES:
        by_status.setdefault(line.status, set()).add(line.field)
    assert by_status["supported"] | by_status["different"] == set(ChatMessage.model_fields)
    assert by_status["ignored"] <= fields.COPIED
    assert by_status["refused"] == set(fields.MESSAGE)
