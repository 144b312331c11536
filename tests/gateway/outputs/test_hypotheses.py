"""The algorithm of beam search equals transformers' on random models, whatever the options."""

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from gateway.errors.request_errors import RequestError
from gateway.outputs.hypotheses import Beam, Hypotheses
from gateway.request.beam_options import BeamNames, BeamOptions, EarlyStopping
from gateway.text.logprobs import RawLogprobs

NAMES = BeamNames("num_beams")
VOCAB_SIZE = 28
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def model() -> Iterator[LlamaForCausalLM]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # products of a few rows: others would only wait
    torch.manual_seed(19)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.25,
        bos_token_id=None,
        eos_token_id=None,
    )
    yield LlamaForCausalLM(config).eval()
    torch.set_num_threads(before)


@torch.inference_mode()
def rows_after(
    model: LlamaForCausalLM, prompt: Sequence[int], search: Hypotheses
) -> list[RawLogprobs]:
    """The likeliest tokens after each running beam, as the worker reports them."""
    token_ids = torch.tensor([[*prompt, *beam.token_ids] for beam in search.running])
    logprobs = model(token_ids).logits[:, -1].float().log_softmax(-1)
    top = logprobs.topk(min(search.num_candidates, VOCAB_SIZE))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [RawLogprobs(values[0], 1, ids, values) for ids, values in pairs]


def run(
    model: LlamaForCausalLM,
    prompt: Sequence[int],
    options: BeamOptions,
    end_ids: Sequence[int],
    max_tokens: int,
) -> Hypotheses:
    search = Hypotheses(options, end_ids, max_tokens)
    while not search.is_over:
        search.advance(rows_after(model, prompt, search))
    return search


@torch.inference_mode()
def of_transformers(
    model: LlamaForCausalLM,
    prompt: Sequence[int],
    options: BeamOptions,
    end_ids: Sequence[int],
    max_tokens: int,
) -> list[tuple[list[int], float]]:
    """Tokens and score of every output, best first."""
    config = GenerationConfig(
        num_beams=options.num_beams,
        num_return_sequences=options.num_beams,
        length_penalty=options.length_penalty,
        early_stopping=options.early_stopping,
        max_new_tokens=max_tokens,
        eos_token_id=list(end_ids) or None,
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    given = torch.tensor([list(prompt)])
    found = model.generate(given, attention_mask=torch.ones_like(given), generation_config=config)
    outputs = []
    for sequence, score in zip(found.sequences.tolist(), found.sequences_scores, strict=True):
        output = sequence[len(prompt) :]
        ends = [index for index, token_id in enumerate(output) if token_id in end_ids]
        outputs.append((output[: ends[0] + 1] if ends else output, float(score)))
    return outputs


CASES = [
    (num_beams, penalty, early_stopping)
    for num_beams, penalty, early_stopping in itertools.product(
        (2, 4, 7), (-1.0, 0.0, 1.0, 2.5), (False, True, "never")
    )
]


@pytest.mark.parametrize(("num_beams", "penalty", "early_stopping"), CASES)
def test_outputs_and_scores_are_those_of_transformers(
    model: LlamaForCausalLM, num_beams: int, penalty: float, early_stopping: EarlyStopping
) -> None:
    rng = random.Random(f"{num_beams} {penalty} {early_stopping}")
    options = BeamOptions(num_beams, NAMES, num_beams, penalty, early_stopping)
    for num_ends, max_tokens in ((0, 5), (1, 1), (1, 14), (2, 9), (3, 14)):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 6))]
        end_ids = rng.sample(range(VOCAB_SIZE), num_ends)
        found = run(model, prompt, options, end_ids, max_tokens).finished
        expected = of_transformers(model, prompt, options, end_ids, max_tokens)
        assert [list(one.beam.token_ids) for one in found] == [ids for ids, _ in expected]
        scores = [score for _, score in expected]
        assert [one.score for one in found] == pytest.approx(scores, rel=1e-4)


def test_some_outputs_stop_and_some_reach_the_limit(model: LlamaForCausalLM) -> None:
    options = BeamOptions(4, NAMES, 4)
    ends = {
        one.is_stopped
        for end_id in range(VOCAB_SIZE)
        for one in run(model, PROMPT, options, [end_id], 6).finished
    }
    assert ends == {True, False}, "the cases above would leave a rule untried"


def test_one_beam_without_an_end_is_the_greedy_output(model: LlamaForCausalLM) -> None:
    (found,) = run(model, PROMPT, BeamOptions(1, NAMES), [], 8).finished
    given = torch.tensor([PROMPT])
    mask = torch.ones_like(given)
    greedy = model.generate(given, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert [*PROMPT, *found.beam.token_ids] == greedy[0].tolist()
    assert not found.is_stopped


def test_logprobs_are_of_the_chosen_tokens_and_add_up(model: LlamaForCausalLM) -> None:
    for one in run(model, PROMPT, BeamOptions(3, NAMES, 3), [], 6).finished:
        token_ids, logprobs = one.beam.token_ids, one.beam.logprobs
        assert len(token_ids) == len(logprobs) == 6
        assert sum(row.logprob for row in logprobs) == pytest.approx(one.beam.total)
        for token_id, row in zip(token_ids, logprobs, strict=True):
            assert row.top_token_ids[row.rank - 1] == token_id
            assert row.top_logprobs[row.rank - 1] == row.logprob


def test_the_first_beam_has_no_tokens() -> None:
    search = Hypotheses(BeamOptions(2, NAMES), [0], 3)
    assert search.running == [Beam()] and Beam().token_ids == () and Beam().logprobs == []
    assert search.num_candidates == 4
    assert Hypotheses(BeamOptions(2, NAMES), [0, 1], 3).num_candidates == 6


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("num_beams", {"num_beams": 0}),
        ("num_beams", {"num_beams": 17}),
        ("n", {"num_outputs": 0}),
        ("n", {"num_outputs": 3}),
        ("length_penalty", {"length_penalty": 10.5}),
        ("length_penalty", {"length_penalty": float("nan")}),
        ("length_penalty", {"length_penalty": float("-inf")}),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(field: str, values: dict[str, float]) -> None:
    with pytest.raises(RequestError) as refusal:
        BeamOptions(**({"num_beams": 2, "names": NAMES} | values))  # type: ignore[arg-type]
    assert refusal.value.field == field
