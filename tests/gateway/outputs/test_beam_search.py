"""A beam search through the gateway: its outputs, its requests, and how it ends early."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest

from gateway.outputs.hypotheses import Hypotheses
from gateway.request.beam_options import BeamNames, BeamOptions
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import scheduler_pb2, types_pb2
from tests.gateway.conftest import eventually
from tests.gateway.http_calls import error_of, post
from tests.gateway.outputs.random_model import RandomModel, generate, likeliest, searched
from wire import columns

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
BODY = {"prompt": [3, 4, 5], "max_tokens": 9, "use_beam_search": True, "n": 4}
TURNS = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def model(running: Any) -> Iterator[RandomModel]:
    yield RandomModel(running.scheduler)
    del running.scheduler._answer


def expected(
    scheduler: Any,
    num_beams: int,
    *,
    prompt: Sequence[int] = (3, 4, 5),
    max_tokens: int = 9,
    end_ids: Sequence[int] = (1,),
    **options: Any,
) -> Hypotheses:
    names = BeamNames("n")
    beams = BeamOptions(num_beams=num_beams, names=names, num_outputs=num_beams, **options)
    search = Hypotheses(beams, end_ids, max_tokens)
    return searched(search, prompt, scheduler.model.vocab_size)


def ids_of(search: Hypotheses) -> list[list[int]]:
    return [list(one.beam.token_ids) for one in search.finished]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"length_penalty": 0.0},
        {"length_penalty": -1.5, "early_stopping": True},
        {"length_penalty": 3.0, "early_stopping": "never"},
    ],
)
async def test_over_http_the_outputs_are_the_best_of_the_search(
    fields: dict[str, Any], running: Any, model: RandomModel
) -> None:
    body = BODY | fields | {"return_token_ids": True}
    choices = (await post(running, COMPLETION, body))["choices"]
    search = expected(running.scheduler, 4, **fields)
    assert [choice["token_ids"] for choice in choices] == ids_of(search)
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    reasons = ["stop" if one.is_stopped else "length" for one in search.finished]
    assert [choice["finish_reason"] for choice in choices] == reasons


async def test_best_of_is_the_number_of_beams_where_fewer_outputs_are_wanted(
    running: Any, model: RandomModel
) -> None:
    body = BODY | {"n": 2, "best_of": 5, "return_token_ids": True}
    answer = await post(running, COMPLETION, body)
    best = ids_of(expected(running.scheduler, 5))[:2]
    assert [choice["token_ids"] for choice in answer["choices"]] == best
    counts = [3, sum(map(len, best))]
    usage = answer["usage"]
    assert [usage["prompt_tokens"], usage["completion_tokens"]] == counts


async def test_each_of_several_prompts_is_searched(running: Any, model: RandomModel) -> None:
    prompts = [[3, 4], [5, 6, 7]]
    body = BODY | {"prompt": prompts, "n": 2, "return_token_ids": True}
    choices = (await post(running, COMPLETION, body))["choices"]
    found = [choice["token_ids"] for choice in choices]
    searches = [expected(running.scheduler, 2, prompt=prompt) for prompt in prompts]
    assert found == [ids for search in searches for ids in ids_of(search)]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]


async def test_a_chat_is_searched_and_read(running: Any, model: RandomModel, encode: Any) -> None:
    body = {"messages": TURNS, "use_beam_search": True, "n": 2, "max_completion_tokens": 5}
    answer = await post(running, CHAT, body | {"return_token_ids": True})
    prompt = running.scheduler.prompt_of(0)
    search = expected(running.scheduler, 2, prompt=prompt, max_tokens=5)
    assert [choice["token_ids"] for choice in answer["choices"]] == ids_of(search)
    assert all(choice["message"]["role"] == "assistant" for choice in answer["choices"])


async def test_over_grpc_an_output_has_its_sum_and_its_tokens_their_log_probabilities(
    running: Any, model: RandomModel
) -> None:
    beams = pb.BeamSearch(num_beams=3, length_penalty=0.5, early_stopping=pb.EARLY_STOPPING_NEVER)
    response = await generate(
        running, beam_search=beams, n=3, sampling=types_pb2.SamplingParams(logprobs=2)
    )
    search = expected(running.scheduler, 3, length_penalty=0.5, early_stopping="never")
    outputs = [response.output, *response.more_outputs]
    assert [list(output.token_ids) for output in outputs] == ids_of(search)
    for output, one in zip(outputs, search.finished, strict=True):
        assert output.cumulative_logprob == pytest.approx(one.beam.total)
        told = [(row.logprob, row.rank) for row in output.logprobs]
        assert told == [(pytest.approx(r.logprob), r.rank) for r in one.beam.logprobs]
        assert {len(row.top_token_ids) for row in output.logprobs} == {2}
        assert output.timings.total_s >= output.timings.first_token_s > 0


async def test_a_stop_token_ends_an_output_and_is_named(running: Any, model: RandomModel) -> None:
    (end_id,) = likeliest([3, 4, 5], running.scheduler.model.vocab_size, 1).top_token_ids
    sampling = types_pb2.SamplingParams(stop_token_ids=[end_id], ignore_eos=True)
    beams = pb.BeamSearch(  # the shortest outputs score best
        num_beams=2, length_penalty=0, early_stopping=pb.EARLY_STOPPING_TRUE
    )
    response = await generate(running, beam_search=beams, n=2, sampling=sampling)
    rules = {"length_penalty": 0.0, "early_stopping": True}
    search = expected(running.scheduler, 2, end_ids=[end_id], **rules)
    outputs = [response.output, *response.more_outputs]
    assert [list(output.token_ids) for output in outputs] == ids_of(search)
    stopped = [output for output in outputs if output.HasField("stop_token_id")]
    assert stopped and {output.stop_token_id for output in stopped} == {end_id}


async def test_ignore_eos_searches_to_the_limit(running: Any, model: RandomModel) -> None:
    body = BODY | {"ignore_eos": True, "return_token_ids": True, "max_tokens": 30}
    choices = (await post(running, COMPLETION, body))["choices"]
    search = expected(running.scheduler, 4, end_ids=[], max_tokens=30)
    assert [choice["token_ids"] for choice in choices] == ids_of(search)
    assert {choice["finish_reason"] for choice in choices} == {"length"}


async def test_the_models_limit_ends_a_search_without_a_limit(
    running: Any, model: RandomModel
) -> None:
    running.scheduler.model.max_model_len = 16
    await running.until_policy("")
    body = {"prompt": [3] * 250, "max_tokens": None, "use_beam_search": True, "n": 2}
    choices = (await post(running, COMPLETION, body | {"return_token_ids": True}))["choices"]
    assert max(len(choice["token_ids"]) for choice in choices) <= 6


async def test_rounds_continue_and_are_never_refused_for_overload(
    running: Any, model: RandomModel
) -> None:
    await post(running, COMPLETION, BODY | {"cache_salt": "a", "request_id": "b"})
    first, *others = running.scheduler.submits
    assert first.request_id == "b" and not first.HasField("num_prompt_tokens")
    assert {submit.request_id for submit in others} <= {"b", "b-1", "b-2", "b-3"}
    for submit in others:
        num_output = running.scheduler.num_output(submit)
        assert num_output >= 1 and submit.num_prompt_tokens == 3
        assert submit.sampling.max_tokens == num_output + 1 and submit.sampling.ignore_eos
        assert not submit.resumed_by_client
        assert submit.cache_salt == "a"
    assert not model.live


async def test_without_the_prefix_cache_a_search_shares_with_itself_alone(
    running: Any, model: RandomModel
) -> None:
    for _ in range(2):
        await post(running, COMPLETION, BODY | {"skip_prefix_cache": True})
    salts = [submit.cache_salt for submit in running.scheduler.submits]
    assert len(set(salts)) == 2 and all(len(salt) == 32 for salt in salts)
    assert not any(submit.skip_prefix_cache for submit in running.scheduler.submits)


@pytest.mark.parametrize("num_answered", [0, 1, 2, 7])
async def test_a_client_that_leaves_leaves_no_request(
    num_answered: int, running: Any, model: RandomModel
) -> None:
    """However far it has come, each submitted request has ended or is aborted."""
    left: list[Any] = []

    def hang(submit: Any, outbox: Any) -> bool:
        if len(running.scheduler.submits) <= num_answered:
            return False
        left.append(submit)
        return True

    model.disturb = hang
    call = asyncio.create_task(generate(running, beam_search=pb.BeamSearch(num_beams=3)))
    await eventually(lambda: bool(left), "a round hangs")
    call.cancel()
    aborted = running.scheduler.aborted
    await eventually(lambda: model.live <= set(aborted), "what was live is aborted")
    assert running.gateway._pipeline.num_open == 0
    assert not running.gateway._link._live


async def test_one_beam_that_fails_ends_the_search_and_its_round(
    running: Any, model: RandomModel
) -> None:
    def fail(submit: Any, outbox: Any) -> bool:
        if running.scheduler.num_output(submit) < 3:
            return False
        if submit.request_id.endswith("-1"):
            finished = scheduler_pb2.Finished(
                handle=submit.handle,
                reason=types_pb2.FINISH_REASON_ERROR,
                status_code=grpc.StatusCode.INTERNAL.value[0],
                message="the logits were not finite",
            )
            model.live.discard(submit.handle)
            outbox.put_nowait(scheduler_pb2.SessionResponse(finished=[finished]))
        return True  # the others hang

    def release(submit: Any, outbox: Any) -> bool:
        if fail(submit, outbox) and not submit.request_id.endswith("-2"):
            if not submit.request_id.endswith("-1"):
                model.tell(submit, outbox)
            return True
        return running.scheduler.num_output(submit) >= 3

    model.disturb = release
    response = await running.http.post(COMPLETION, json=BODY)
    assert "not finite" in error_of(response, 500)["message"]
    aborted = running.scheduler.aborted
    await eventually(lambda: model.live <= set(aborted), "what was live is aborted")
    assert not running.gateway._link._live


async def test_a_scheduler_that_is_lost_in_a_round_changes_nothing(
    running: Any, model: RandomModel
) -> None:
    broken: list[Any] = []

    def lose(submit: Any, outbox: Any) -> bool:
        if running.scheduler.num_output(submit) != 4 or len(broken) == 2:
            return False
        broken.append(submit)
        if len(broken) == 2:
            outbox.put_nowait(None)
        return True

    model.disturb = lose
    choices = (await post(running, COMPLETION, BODY | {"return_token_ids": True}))["choices"]
    assert len(broken) == 2
    found = [choice["token_ids"] for choice in choices]
    assert found == ids_of(expected(running.scheduler, 4))


async def test_a_round_that_is_aborted_from_outside_cancels_the_search(
    running: Any, model: RandomModel
) -> None:
    def abort(submit: Any, outbox: Any) -> bool:
        reason = types_pb2.FINISH_REASON_ABORT
        finished = scheduler_pb2.Finished(handle=submit.handle, reason=reason)
        outbox.put_nowait(scheduler_pb2.SessionResponse(finished=[finished]))
        return True

    model.disturb = abort
    with pytest.raises(grpc.aio.AioRpcError, match="aborted") as error:
        await generate(running, beam_search=pb.BeamSearch(num_beams=2))
    assert error.value.code() is grpc.StatusCode.CANCELLED


async def test_the_deadline_runs_on_from_round_to_round(running: Any, model: RandomModel) -> None:
    headers = {"x-timeout-s": "1000"}
    response = await running.http.post(COMPLETION, json=BODY, headers=headers)
    assert response.status_code == 200
    left = [submit.timeout_s for submit in running.scheduler.submits]
    assert left == sorted(left, reverse=True) and 0 < left[-1] < left[0] <= 1000


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1, "top_p": 1.0, "top_k": -1, "min_p": 0, "seed": 5},
        {"temperature": 0, "top_k": 0, "repetition_penalty": 1, "presence_penalty": 0.0},
        {"stop": [], "bad_words": [], "logit_bias": {}, "min_tokens": 0, "stream": False},
    ],
)
async def test_what_asks_for_nothing_is_accepted(
    fields: dict[str, Any], running: Any, model: RandomModel
) -> None:
    choices = (await post(running, COMPLETION, BODY | fields | {"return_token_ids": True}))[
        "choices"
    ]
    found = [choice["token_ids"] for choice in choices]
    assert found == ids_of(expected(running.scheduler, 4))


async def test_the_requests_of_a_search_are_one_of_the_gateways(
    running: Any, model: RandomModel
) -> None:
    """It is counted once, while it runs, and listed with how far it has come."""
    held: list[tuple[Any, Any]] = []

    def hold(submit: Any, outbox: Any) -> bool:
        if running.scheduler.num_output(submit) == 4:
            held.append((submit, outbox))
            return True
        return False

    model.disturb = hold
    call = asyncio.create_task(generate(running, beam_search=pb.BeamSearch(num_beams=2)))
    await eventually(lambda: len(held) == 2, "the fifth round")
    pipeline = running.gateway._pipeline
    (progress,) = pipeline.live
    assert (pipeline.num_open, progress.num_output_tokens, progress.num_prompt_tokens) == (1, 4, 3)
    model.disturb = lambda submit, outbox: False
    for submit, outbox in held:
        model.tell(submit, outbox)
    await call
    assert pipeline.num_open == 0


async def test_prompts_reach_the_scheduler_with_the_beams_tokens_after_them(
    running: Any, model: RandomModel
) -> None:
    await post(running, COMPLETION, BODY)
    for submit in running.scheduler.submits:
        assert columns.unpack(submit.prompt_token_ids).tolist()[:3] == [3, 4, 5]
