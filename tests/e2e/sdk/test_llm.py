"""pagewire.LLM: a whole product of a program's own, with a tiny model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import pagewire
from pagewire.offline import llm as offline

NUM_PROMPTS = offline.MAX_IN_FLIGHT + 40
TURN = {"role": "user", "content": "Hello"}


@pytest.fixture(scope="module")
def llm(terse_model: Path) -> Iterator[pagewire.LLM]:
    with pagewire.LLM(
        terse_model, dtype="float32", threads=1, kv_cache_gib=0.3, enable_prefix_caching=False
    ) as running:
        yield running


def test_answers_come_in_the_order_of_more_prompts_than_are_in_flight(llm: pagewire.LLM) -> None:
    """Each prompt with its own parameters, which its answer shows."""
    prompts = [[5 + index, 7, 9] for index in range(NUM_PROMPTS)]
    params = [
        pagewire.SamplingParams(max_tokens=1 + index % 5, temperature=0, ignore_eos=True)
        for index in range(NUM_PROMPTS)
    ]
    found = llm.generate(prompts, params)
    assert [len(answer.token_ids) for answer in found] == [one.max_tokens for one in params]
    for index in (0, 3, NUM_PROMPTS - 1):
        alone = llm.client.generate(prompts[index], params[index])
        assert found[index].token_ids == alone.token_ids


def test_one_prompt_or_conversation_is_a_list_of_one(llm: pagewire.LLM) -> None:
    text, ids = llm.generate("Hello", max_tokens=2), llm.generate([5, 6], max_tokens=2)
    assert [len(text), len(ids)] == [1, 1]
    assert ids[0].usage.prompt_tokens == 2
    for one in ("Hello", [TURN], [pagewire.Message("user", "Hello")]):
        assert len(llm.chat(one, max_tokens=2)) == 1
    for many in (["Hello", "Hello"], [[TURN], [TURN]]):
        first, second = llm.chat(many, max_tokens=4, temperature=0)
        assert (
            first.text == second.text == llm.client.chat("Hello", max_tokens=4, temperature=0).text
        )
    assert llm.generate([]) == llm.chat([]) == []


def test_a_beam_search_gives_all_beams_best_first(llm: pagewire.LLM) -> None:
    found = llm.beam_search(["Hello", "Good"], pagewire.BeamSearch(3), max_tokens=4)
    outputs = found[0].outputs
    assert [len(one.outputs) for one in found] == [3, 3]
    assert len({one.token_ids for one in outputs}) == 3
    (few,) = llm.beam_search("Hello", pagewire.BeamSearch(3), max_tokens=4, n=2)
    assert [one.token_ids for one in few.outputs] == [one.token_ids for one in outputs[:2]]


def test_vectors_of_many_inputs_are_those_of_each(
    llm: pagewire.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline, "MAX_EMBEDDED", 2)
    inputs = ["a", [5, 6, 7], "b c", "d", "e"]
    found = llm.embed(inputs, pooling="mean")
    assert len(found.vectors) == 5
    for one, vector in zip(inputs, found.vectors, strict=True):
        (alone,) = llm.embed(one, pooling="mean").vectors
        assert vector == pytest.approx(alone, abs=1e-5)
    assert found.usage.prompt_tokens == sum(llm.embed(o).usage.prompt_tokens for o in inputs)


@pytest.mark.parametrize("call", ["generate", "chat", "embed"])
def test_no_prompts_are_a_value_error(llm: pagewire.LLM, call: str) -> None:
    with pytest.raises(ValueError, match="needs a list of"):
        getattr(llm, call)(None)
