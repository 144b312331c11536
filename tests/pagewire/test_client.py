"""The blocking client with a real server."""

import gc
import threading
import time

import pytest

import pagewire
from pagewire import FinishReason, Message, SamplingParams, TokenLogprobs, Usage
from pagewire._messages import answers
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import types_pb2
from tests.pace import patience


@pytest.fixture
def client(gateway):
    with pagewire.Client(gateway.target, timeout_s=patience(20)) as client:
        yield client


def test_generate_returns_the_whole_output(client, gateway):
    completion = client.generate("Q", model="tiny", request_id="mine")
    assert completion.text == "Q:The capital is Paris."
    assert completion.token_ids == (3, 8, 3, 6, 1)
    assert completion.finish_reason is FinishReason.STOP
    assert completion.finish_reason == "stop"
    assert completion.usage == Usage(prompt_tokens=3, completion_tokens=5, cached_tokens=2)
    assert completion.usage.total_tokens == 8
    assert (completion.request_id, completion.model) == ("made", "tiny")
    assert gateway.requests[0].options.model == "tiny"
    assert gateway.requests[0].options.request_id == "mine"


def test_generate_sends_token_ids_as_they_are(client, gateway):
    client.generate([5, 6, 7])
    assert list(gateway.requests[0].prompt.token_ids.ids) == [5, 6, 7]


def test_chat_takes_a_string_messages_and_mappings(client, gateway):
    assert client.chat("Q").text == "Q:The capital is Paris."
    client.chat([Message("system", "be brief"), {"role": "user", "content": "Q"}])
    assert list(gateway.requests[0].messages) == [pb.ChatMessage(role="user", content="Q")]
    assert [turn.role for turn in gateway.requests[1].messages] == ["system", "user"]


def test_a_stream_brings_pieces_and_then_the_whole(client):
    stream = client.stream("Q")
    deltas = list(stream)
    assert [delta.text for delta in deltas] == ["The", " capital", " is", " Paris", "."]
    assert [delta.finish_reason for delta in deltas] == [None] * 4 + [FinishReason.STOP]
    assert deltas[-1].usage == Usage(prompt_tokens=3, completion_tokens=5)
    assert stream.completion().text == "The capital is Paris."
    assert stream.completion().token_ids == (3, 8, 3, 6, 1)
    assert stream.request_id == "made"


def test_stream_chat_can_be_read_as_a_whole(client):
    assert client.stream_chat("Q", max_tokens=2).completion().text == "The capital"


def test_keywords_win_over_params_and_both_reach_the_server(client, gateway):
    params = SamplingParams(temperature=0.5, max_tokens=9, stop="END", stop_token_ids=[4])
    client.generate("Q", params, max_tokens=3, skip_special_tokens=False, ignore_eos=True)
    options = gateway.requests[0].options
    assert options.sampling.temperature == 0.5
    assert options.sampling.max_tokens == 3
    assert options.sampling.ignore_eos
    assert not options.sampling.HasField("top_p")
    assert list(options.sampling.stop_token_ids) == [4]
    assert list(options.stop) == ["END"]
    assert options.HasField("skip_special_tokens")
    assert not options.skip_special_tokens


def test_rules_reach_the_server(client, gateway):
    params = SamplingParams(logit_bias={7: -2.5}, allowed_token_ids=[7, 8], bad_words=["a b"])
    client.generate(
        "Q",
        params,
        presence_penalty=0.5,
        repetition_penalty=1.5,
        logprobs=0,
        logprob_token_ids=[7, 5],
    )
    options = gateway.requests[0].options
    sampling = options.sampling
    assert [(entry.token_id, entry.bias) for entry in sampling.logit_bias] == [(7, -2.5)]
    assert list(sampling.allowed_token_ids) == [7, 8]
    assert list(options.bad_words) == ["a b"]
    assert (sampling.presence_penalty, sampling.repetition_penalty) == (0.5, 1.5)
    assert list(sampling.logprob_token_ids) == [7, 5]
    assert sampling.HasField("logprobs") and not sampling.HasField("frequency_penalty")


def test_logprobs_come_with_their_tokens():
    token = types_pb2.TokenLogprobs(
        logprob=-0.5, rank=2, top_token_ids=[9, 4], top_logprobs=[-0.25, -0.5]
    )
    expected = TokenLogprobs(-0.5, 2, ((9, -0.25), (4, -0.5)))
    delta = pb.OutputDelta(
        token_ids=[4], logprobs=[token], finish_reason=types_pb2.FINISH_REASON_STOP
    )
    assembly = answers.Assembly()
    read = assembly.read(pb.GenerateStreamResponse(delta=delta))
    assert read.logprobs == assembly.completion().logprobs == (expected,)
    output = pb.Output(token_ids=[4], logprobs=[token], finish_reason=types_pb2.FINISH_REASON_STOP)
    whole = answers.to_completion(pb.GenerateResponse(output=output))
    assert whole.logprobs == (expected,)


def test_prompt_logprobs_come_with_the_prompt_and_nothing_for_its_first_token(client, gateway):
    client.generate("Q", prompt_logprobs=0, max_tokens=1)
    assert gateway.requests[0].options.sampling.HasField("prompt_logprobs")
    token = types_pb2.TokenLogprobs(logprob=-0.5, rank=1)
    told = {"prompt_token_ids": [7, 8], "prompt_logprobs": [token]}
    expected = (None, TokenLogprobs(-0.5, 1))
    end = pb.OutputDelta(token_ids=[4], finish_reason=types_pb2.FINISH_REASON_STOP)
    assembly = answers.Assembly()
    read = assembly.read(pb.GenerateStreamResponse(delta=pb.OutputDelta(**told)))
    assert assembly.read(pb.GenerateStreamResponse(delta=end)).prompt_logprobs == ()
    output = pb.Output(finish_reason=types_pb2.FINISH_REASON_STOP, **told)
    whole = answers.to_completion(pb.GenerateResponse(output=output))
    for found in (read, assembly.completion(), whole):
        assert (found.prompt_token_ids, found.prompt_logprobs) == ((7, 8), expected)


def test_embeddings_come_in_the_order_of_the_inputs(client, gateway):
    found = client.embed(["a", [5, 6]], pooling="mean", normalize=False, request_id="e")
    assert found.vectors == ((0.0, 0.5), (1.0, 0.5))
    assert (found.usage.prompt_tokens, found.request_id, found.model) == (6, "e", "tiny")
    request = gateway.requests[0]
    assert [prompt.WhichOneof("input") for prompt in request.inputs] == ["text", "token_ids"]
    assert request.pooling == types_pb2.POOLING_MEAN
    assert request.HasField("normalize") and not request.normalize
    assert len(client.embed("one text").vectors) == 1
    assert gateway.requests[1].pooling == types_pb2.POOLING_LAST


def test_inputs_that_cannot_be_embedded_are_refused_by_name(client, gateway):
    with pytest.raises(pagewire.InvalidArgument, match="inputs"):
        client.embed([5, 6])
    with pytest.raises(pagewire.InvalidArgument, match="pooling"):
        client.embed("a", pooling="max")
    assert gateway.requests == []


def test_zero_is_sent_and_differs_from_absence(client, gateway):
    client.generate("Q", temperature=0, top_k=0, seed=0, min_tokens=0)
    sampling = gateway.requests[0].options.sampling
    assert all(sampling.HasField(name) for name in ("temperature", "top_k", "seed", "min_tokens"))
    assert not sampling.HasField("max_tokens")


@pytest.mark.parametrize("method", ["generate", "stream", "chat", "stream_chat"])
def test_an_unknown_keyword_is_a_type_error_that_names_it(client, method):
    with pytest.raises(TypeError, match="best_of"):
        getattr(client, method)("Q", best_of=2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1),
        ("seed", -1),
        ("logit_bias", {-1: 1.0}),
        ("temperature", "hot"),
        ("stop", [1]),
        ("model", 7),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_name(client, gateway, name, value):
    with pytest.raises(pagewire.InvalidArgument, match=f"^{name}: "):
        client.generate("Q", **{name: value})
    assert not gateway.requests


def test_a_message_with_more_than_role_and_content_is_refused_by_name(client):
    with pytest.raises(pagewire.InvalidArgument, match=r"messages\[0\]\.tool_calls"):
        client.chat([{"role": "user", "content": "Q", "tool_calls": "[]"}])
    with pytest.raises(pagewire.InvalidArgument, match=r"messages\[0\]\.content"):
        client.chat([{"role": "user"}])


@pytest.mark.parametrize("leave", ["close", "with", "drop"])
def test_leaving_a_stream_early_cancels_it_on_the_server(client, gateway, leave):
    stream = client.stream("endless")
    assert next(stream).text == "on "
    assert not gateway.cancelled.is_set()
    if leave == "close":
        stream.close()
        with pytest.raises(pagewire.Cancelled):
            list(stream)
    elif leave == "with":
        with stream:
            pass
    else:
        del stream
        gc.collect()
    assert gateway.cancelled.wait(patience(5))


def test_a_stream_that_ends_without_a_reason_is_an_error(client):
    stream = client.stream("broken")
    with pytest.raises(pagewire.Internal, match="finish reason"):
        list(stream)
    assert stream.text == "The capital is Paris."


def test_the_deadline_of_a_call_ends_it_on_both_sides(client, gateway):
    start_s = time.monotonic()
    with pytest.raises(pagewire.DeadlineExceeded, match=gateway.target):
        client.generate("hang", timeout_s=0.2)
    assert time.monotonic() - start_s < patience(10)  # the client's own is twice as long
    assert gateway.cancelled.wait(patience(5))


def test_the_clients_deadline_is_that_of_every_call(gateway):
    with (
        pagewire.Client(gateway.target, timeout_s=0.2) as client,
        pytest.raises(pagewire.DeadlineExceeded),
    ):
        list(client.stream("hang"))


def test_batch_keeps_the_order_and_the_bound(client, gateway):
    prompts = ["wait" if index % 3 else f"{index}" for index in range(30)]
    completions = client.batch(prompts, max_concurrency=4, max_tokens=1, request_id="nightly")
    assert [completion.text for completion in completions] == [f"{p}:The" for p in prompts]
    assert 2 <= gateway.max_live <= 4
    ids = {request.options.request_id for request in gateway.requests}
    assert ids == {f"nightly-{index}" for index in range(30)}


def test_a_failure_in_a_batch_cancels_the_rest(client, gateway):
    start_s = time.monotonic()
    with pytest.raises(pagewire.NotFound):
        client.batch(["hang", "hang", "fail NOT_FOUND", *["never"] * 50], max_concurrency=3)
    assert time.monotonic() - start_s < patience(5)
    assert gateway.cancelled.wait(patience(5))
    assert gateway.num_calls["Generate"] < 10


def test_an_empty_batch_is_empty_and_a_string_is_no_batch(client):
    assert client.batch([]) == []
    with pytest.raises(pagewire.InvalidArgument, match="prompts"):
        client.batch("Q")
    with pytest.raises(ValueError, match="max_concurrency"):
        client.batch(["Q"], max_concurrency=0)


def test_batch_shows_a_bar_where_it_is_asked_to(client, capsys):
    client.batch(["a", "b"], progress=True)
    assert "2/2" in capsys.readouterr().err
    client.batch(["a", "b"])
    assert capsys.readouterr().err == ""


def test_tokenize_and_detokenize_are_inverse(client, gateway):
    token_ids = client.tokenize("hello", add_special_tokens=False)
    assert token_ids == tuple(b"hello")
    assert gateway.requests[0].HasField("add_special_tokens")
    assert client.detokenize(token_ids) == "hello"
    client.tokenize([Message("user", "Q")])
    assert gateway.requests[2].conversation.messages[0].content == "Q"


def test_models_are_values(client):
    assert client.models() == (
        pagewire.Model("tiny", "LlamaForCausalLM", 1000, 512, (2,), "float32"),
    )


def test_wait_until_ready_returns_once_a_model_is_there(client, gateway):
    gateway.models = []
    gateway.num_unavailable["ListModels"] = 6
    ready = threading.Timer(0.5, gateway.models.append, [pb.ListModelsResponse().models.add()])
    ready.start()
    assert len(client.wait_until_ready(timeout_s=patience(15))) == 1
    ready.join()


def test_wait_until_ready_gives_up_in_words(gateway):
    gateway.models = []
    with pagewire.Client(gateway.target) as client:
        with pytest.raises(pagewire.DeadlineExceeded, match=r"not ready after 0\.5 s.*no model"):
            client.wait_until_ready(timeout_s=0.5)
        gateway.num_unavailable["ListModels"] = 10**6
        with pytest.raises(pagewire.DeadlineExceeded, match="not now"):
            client.wait_until_ready(timeout_s=2.0)


def test_one_client_serves_many_threads(client):
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda: texts.append(client.generate("Q").text)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(10))
    assert texts == ["Q:The capital is Paris."] * 8
