"""Batches of prompts and chats: failures in their places, and forms read into objects."""

import asyncio
import json

import pydantic
import pytest

import pagewire
from pagewire.testing import FakeServer


class City(pydantic.BaseModel):
    """A model class with a rule that no schema has."""

    name: str
    population: int

    @pydantic.field_validator("name")
    @classmethod
    def _is_capitalized(cls, name: str) -> str:
        if not name.istitle():
            raise ValueError("a city has a capital letter")
        return name


PARIS = '{"name": "Paris", "population": 2100000}'


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_failure_may_take_the_place_of_its_result(gateway, is_chat: bool) -> None:
    prompts = ["a", "fail NOT_FOUND", "b", "fail INTERNAL"]

    async def ask() -> list[pagewire.Completion | pagewire.PagewireError]:
        async with pagewire.AsyncClient(gateway.target) as client:
            batch = client.batch_chat if is_chat else client.batch
            return await batch(prompts, return_errors=True, max_concurrency=2)

    with pagewire.Client(gateway.target) as client:
        batch = client.batch_chat if is_chat else client.batch
        for results in (batch(prompts, return_errors=True, max_concurrency=2), asyncio.run(ask())):
            kinds = [type(one) for one in results]
            assert kinds == [
                pagewire.Completion,
                pagewire.NotFound,
                pagewire.Completion,
                pagewire.Internal,
            ]
            texts = [one.text for one in results if isinstance(one, pagewire.Completion)]
            assert texts == ["a:The capital is Paris.", "b:The capital is Paris."]


def test_chats_of_a_batch_are_conversations_with_their_options(gateway) -> None:
    with pagewire.Client(gateway.target) as client:
        turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Q"}]
        answers = client.batch_chat([turns, "R"], max_tokens=1, request_id="night")
        assert [answer.text for answer in answers] == ["Q:The", "R:The"]
        ids = {len(one.messages): one.options.request_id for one in gateway.requests}
        assert ids == {2: "night-0", 1: "night-1"}
        with pytest.raises(pagewire.InvalidArgument, match="conversations"):
            client.batch_chat("Q")


def test_a_model_class_gives_the_form_and_reads_the_answer() -> None:
    async def ask(server: FakeServer) -> object:
        async with server.async_client() as client:
            return (await client.chat("a", structured_output=City)).parsed

    paris = City(name="Paris", population=2100000)
    with FakeServer(PARIS) as server, server.client() as client:
        params = pagewire.SamplingParams(structured_output=City)
        assert client.generate("a", params).parsed == paris
        assert client.stream_chat("a", structured_output=City).completion().parsed == paris
        assert client.batch(["a"], params)[0].parsed == paris
        assert asyncio.run(ask(server)) == paris
        several = client.chat("a", n=2, temperature=1, structured_output=City)
        assert several.parsed == several.more[0].parsed == paris
        for one in server.received:
            assert json.loads(one.options.structured_output.json_schema) == City.model_json_schema()
        assert client.generate("a").parsed is None
        assert client.generate("a", params, structured_output=None).parsed is None


def test_what_was_cut_off_has_no_object_and_what_its_class_refuses_is_an_error() -> None:
    with FakeServer(PARIS) as server, server.client() as client:
        cut = client.generate("a", structured_output=City, max_tokens=5)
        assert (cut.finish_reason, cut.parsed) == ("length", None)
        server.answer = PARIS.lower()
        for ask in (client.generate, lambda *a, **o: client.stream(*a, **o).completion()):
            with pytest.raises(pagewire.InvalidOutput, match=r"(?s)City.*capital letter") as caught:
                ask("a", structured_output=City)
            assert caught.value.text == PARIS.lower()
            assert isinstance(caught.value.__cause__, pydantic.ValidationError)
        (kept,) = client.batch(["a"], structured_output=City, return_errors=True)
        assert isinstance(kept, pagewire.InvalidOutput)
        with pytest.raises(pagewire.InvalidArgument, match="structured_output: must be"):
            client.generate("a", structured_output=dict)


def test_an_answer_says_how_long_it_took_and_who_measured(gateway) -> None:
    with FakeServer("one two three") as server, server.client() as client:
        whole = client.generate("a").timings
        assert whole and whole.measured_by == "client" and whole.total_s > 0
        assert whole.first_token_s is None
        streamed = client.stream("a").completion().timings
        assert streamed and streamed.measured_by == "client" and streamed.queue_s is None
        assert 0 < streamed.first_token_s <= streamed.total_s
        assert 0 <= streamed.per_token_s <= streamed.total_s


@pytest.mark.parametrize("given", [None, 5])
def test_what_is_no_list_is_a_value_error(given: object) -> None:
    with FakeServer() as server, server.client() as client:
        for method in (client.batch, client.batch_chat):
            with pytest.raises(ValueError, match=f"needs a list of .*{given}"):
                method(given)
        assert not server.received


@pytest.mark.parametrize("is_chat", [False, True])
def test_each_one_of_a_batch_may_have_its_own_parameters(is_chat: bool) -> None:
    prompts, lengths = ["a", "b", "c"], (3, 1, 2)
    params = [pagewire.SamplingParams(max_tokens=length) for length in lengths]

    async def ask(server: FakeServer) -> list[pagewire.Completion]:
        async with server.async_client() as client:
            return await (client.batch_chat if is_chat else client.batch)(prompts, params)

    with FakeServer("12345") as server, server.client() as client:
        batch = client.batch_chat if is_chat else client.batch
        for found in (batch(prompts, params), asyncio.run(ask(server))):
            assert [len(one.text) for one in found] == list(lengths)
        with pytest.raises(pagewire.InvalidArgument, match="params: 2 for 3"):
            batch(prompts, params[:2])
