"""POST /v1/rerank and /v1/score: what the model is asked, what is returned, what is refused."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.chat.answer import choose
from gateway.chat.template import ChatTemplate
from gateway.http.scoring.relevance import relevance_of
from gateway.request.generation import Finish, FinishReason, Usage, WholeOutput
from gateway.text.logprobs import Candidate, OutputTokenLogprobs
from gateway.tokens.tokenizer import Tokenizer
from pagewire.v1 import types_pb2
from tests.edges import INTEGERS
from tests.gateway.http_calls import error_of, post, refusal, telling_logprobs
from wire.identity.keys import new_key
from wire.identity.options import IdentityOptions
from wire.identity.roles import Role
from wire.logprobs import LogprobColumns

RERANK, SCORE = "/v1/rerank", "/v1/score"
DOCUMENTS = ["London", "Paris is the capital", "Hello"]
BODY: dict[str, Any] = {"model": "tiny", "query": "The capital?", "documents": DOCUMENTS}
# Log probability of `yes`, by document; that of `no` is always -1.
LOGPROBS = {"London": -2.0, "Paris is the capital": -0.5, "Hello": -9.0}


@pytest.fixture(scope="module")
def model_info(model_info: types_pb2.ModelInfo) -> types_pb2.ModelInfo:
    model_info.max_model_len = 4096
    return model_info


@pytest.fixture(autouse=True)
def judge(running: Any, tokenizer: Tokenizer) -> Iterator[None]:
    """A scheduler whose model judges by LOGPROBS."""
    yes_id = tokenizer._encode("yes", False)[0]
    plain = type(running.scheduler)._answer

    def answer(submit: Any, outbox: Any) -> None:
        scheduler = running.scheduler
        (token_id,) = submit.sampling.allowed_token_ids
        text = tokenizer.decode(scheduler.prompt_of(-1), skip_special_tokens=False)
        document = text.split("<Document>: ")[1].split("<|im_end|>")[0]
        logprob = LOGPROBS.get(document, -3.0) if token_id == yes_id else -1.0
        scheduler.output = [token_id]

        def tell(ids: Any, num_top: int) -> LogprobColumns:
            empty = np.zeros((1, num_top), np.int32)
            one, values = np.zeros(1, np.int32), np.array([logprob], np.float32)
            return LogprobColumns(one, values, one + 2, empty, empty.astype(np.float32))

        with telling_logprobs(scheduler, tell):
            scheduler._answer(submit, outbox)
        scheduler._answer = answer

    running.scheduler._answer = answer
    yield
    running.scheduler.__dict__.pop("_answer", None)
    assert type(running.scheduler)._answer is plain


def sigmoid(difference: float) -> float:
    return 1 / (1 + math.exp(-difference))


@pytest.mark.parametrize("route", [RERANK, "/rerank", "/v2/rerank"])
@pytest.mark.asyncio(loop_scope="module")
async def test_documents_come_back_most_relevant_first(route: str, running: Any) -> None:
    answer = await post(running, route, BODY)
    assert [result["index"] for result in answer["results"]] == [1, 0, 2]
    scores = [result["relevance_score"] for result in answer["results"]]
    assert scores == pytest.approx([sigmoid(0.5), sigmoid(-1.0), sigmoid(-8.0)])
    assert all(set(result) == {"index", "relevance_score"} for result in answer["results"])
    num_tokens = sum(len(running.scheduler.prompt_of(index)) for index in (0, 2, 4))
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


@pytest.mark.asyncio(loop_scope="module")
async def test_the_first_ones_and_their_texts(running: Any) -> None:
    more = {"top_n": 2, "return_documents": True, "documents": [{"text": t} for t in DOCUMENTS]}
    answer = await post(running, RERANK, BODY | more)
    texts = [result["document"]["text"] for result in answer["results"]]
    assert texts == ["Paris is the capital", "London"]


@pytest.mark.asyncio(loop_scope="module")
async def test_the_prompt_is_computed_once_for_both_tokens(
    running: Any, tokenizer: Tokenizer
) -> None:
    await post(running, RERANK, BODY | {"instruction": "Find towns", "cache_salt": "a"})
    submits = running.scheduler.submits
    assert len(submits) == 6 and {submit.cache_salt for submit in submits} == {"a"}
    groups = {submit.fork_group for submit in submits}
    assert len(groups) == 3
    prompt = tokenizer.decode(running.scheduler.prompt_of(0), skip_special_tokens=False)
    question = "<Instruct>: Find towns\n<Query>: The capital?\n<Document>: London"
    assert f"<|im_start|>user\n{question}<|im_end|>" in prompt
    assert prompt.endswith("No thinking.")  # the template's variable is off
    for submit in submits:
        assert (submit.sampling.max_tokens, submit.sampling.temperature) == (1, 0)


@pytest.mark.parametrize("route", [SCORE, "/score"])
@pytest.mark.asyncio(loop_scope="module")
async def test_one_text_is_compared_with_each(route: str, running: Any) -> None:
    answer = await post(running, route, {"text_1": "The capital?", "text_2": DOCUMENTS})
    assert answer["object"] == "list"
    expected = [sigmoid(LOGPROBS[document] + 1) for document in DOCUMENTS]
    assert [entry["score"] for entry in answer["data"]] == pytest.approx(expected)
    assert [entry["index"] for entry in answer["data"]] == [0, 1, 2]


@pytest.mark.asyncio(loop_scope="module")
async def test_as_many_are_compared_in_pairs(running: Any) -> None:
    body = {"queries": ["a", "b", "c"], "documents": DOCUMENTS}
    assert len((await post(running, SCORE, body))["data"]) == 3
    assert len((await post(running, SCORE, {"text_1": "a", "text_2": "b"}))["data"]) == 1


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        (RERANK, {"documents": []}, "documents"),
        (RERANK, {"documents": ["a"] * 1025}, "documents"),
        (RERANK, {"documents": ["a", 5]}, "documents[1]"),
        (RERANK, {"documents": ["a", {"image": "x"}]}, "documents[1].text"),
        (RERANK, {"query": 5}, "query"),
        (RERANK, {"query": None}, "query"),
        (RERANK, {"top_n": 0}, "top_n"),
        (RERANK, {"max_tokens_per_doc": 100}, "max_tokens_per_doc"),
        (RERANK, {"documents": ["a", "long " * 9999]}, "documents[1]"),
        (RERANK, {"priority": 1 << 40}, "priority"),
        (SCORE, {"text_1": "a"}, "text_2"),
        (SCORE, {"text_1": [], "text_2": "a"}, "text_1"),
        (SCORE, {"text_1": ["a", "b"], "text_2": "c"}, "text_2"),
        (SCORE, {"text_1": "a", "text_2": "b", "queries": "c"}, "text_1"),
        (SCORE, {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 5}, "truncate_prompt"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_cannot_be_scored_is_refused_by_name(
    route: str, fields: dict[str, Any], param: str, running: Any
) -> None:
    base = BODY if route == RERANK else {}
    status, found, message = await refusal(running, route, base | fields)
    assert status == 400
    assert found.startswith(param) and message.startswith(param)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ messages[0].content }}<think>", "thinks before it answers"),
        (None, "has no chat template"),
    ],
)
async def test_a_model_that_cannot_judge_is_refused(
    template: str | None, problem: str, running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = running.gateway._pipeline
    found = None if template is None else ChatTemplate(template, {})
    chat_format = choose(found, "auto", "auto")
    monkeypatch.setattr(pipeline._tokenizer, "template", found)
    monkeypatch.setattr(pipeline, "chat_format", chat_format)
    status, param, message = await refusal(running, RERANK, BODY)
    assert (status, param) == (400, "model")
    assert problem in message


@pytest.mark.asyncio(loop_scope="module")
async def test_the_key_is_needed(start: Any) -> None:
    running = await start(api_key="secret")
    for route in (RERANK, "/rerank", "/v2/rerank", SCORE, "/score"):
        error_of(await running.http.post(route, json=BODY), 401)


@pytest.mark.asyncio(loop_scope="module")
async def test_tenant_and_ids_are_those_of_the_key(start: Any, tmp_path: Path) -> None:
    key, entry = new_key("alice", "acme", [Role.USER])
    (tmp_path / "keys").write_text(entry.line())
    guarded = await start(identity=IdentityOptions(api_keys=tmp_path / "keys"))
    headers = {"authorization": f"Bearer {key}", "x-request-id": "same"}
    for route, body in ((RERANK, BODY), (SCORE, {"text_1": "The capital?", "text_2": "Hello"})):
        response = await guarded.http.post(route, json=body, headers=headers)
        assert response.status_code == 200 and "acme/" not in response.text
    submits = guarded.scheduler.submits
    assert len(submits) == 2 * len(DOCUMENTS) + 2
    assert {submit.tenant for submit in submits} == {"acme"}
    assert all(submit.request_id.startswith("acme/same-") for submit in submits)
    assert all(submit.cache_salt for submit in submits)


def output(logprob: float) -> WholeOutput:
    finish = Finish(FinishReason.LENGTH, Usage(5, 1))
    sampled = Candidate(1, logprob, 1, b"")
    return WholeOutput("", [1], finish, (OutputTokenLogprobs(sampled, (), 0),))


@given(st.floats(-1e5, 0), st.floats(-1e5, 0))
def test_a_score_is_a_probability_however_unlikely_both_are(yes: float, no: float) -> None:
    found = relevance_of([output(yes), output(no)]).score
    assert 0 <= found <= 1
    assert (found > 0.5) == (yes > no) or abs(yes - no) < 1e-9


@pytest.mark.parametrize(
    ("route", "field"), [(RERANK, "top_n"), (RERANK, "priority"), (SCORE, "priority")]
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_number_at_an_edge_is_answered_or_refused_by_name(
    route: str, field: str, running: Any
) -> None:
    body = BODY if route == RERANK else {"text_1": "The capital?", "text_2": DOCUMENTS}
    for number in (*INTEGERS, 10**400, -(10**400), 1.5, True):
        response = await running.http.post(route, json=body | {field: number})
        assert response.status_code in (200, 400), f"{number}: {response.text}"
        if response.status_code == 400:
            assert response.json()["error"]["param"] == field
