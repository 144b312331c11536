"""Rows with grammars: allowed outputs, independent of batches and preemption."""

import contextlib
import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import llguidance
import llguidance.numpy
import numpy as np
import pytest
import tokenizers
import torch

import wire.grammar
from tests import hostile_grammars as hostile
from tests.worker_svc.conftest import VOCAB_SIZE, WORKER_CONFIG, Greedy, make_prompt
from tests.worker_svc.spelling import DIGITS, EOS, SUMS, make_tokenizer
from wire.forks.limits import CheckLimits
from wire.grammar import Matcher, Vocabulary, read_vocabulary
from wire.grammar_check.checks import GrammarChecks, VocabularySource
from worker_svc.protocol.step import ROW_DEAD_END, NewSequence, RowSampling, StepInput, StepOutput
from worker_svc.runner.model_runner import NO_TOKEN_LEFT, ModelRunner
from worker_svc.sampling.grammars import Grammars
from worker_svc.sampling.mask_filling import GrammarPlace
from worker_svc.startup import startup

SCHEMA = {
    "type": "object",
    "properties": {
        "abc": {"type": "boolean"},
        "a": {"enum": ["ab", "cab", 12]},
        "n": {"type": "integer", "minimum": -3, "maximum": 120},
    },
    "required": ["abc", "n"],
    "additionalProperties": False,
}
OBJECT = Matcher.grammar_from_json_schema(SCHEMA, defaults={"whitespace_flexible": False})


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    return make_tokenizer()


@pytest.fixture(scope="module")
def vocabulary(tokenizer: tokenizers.Tokenizer) -> Vocabulary:
    return read_vocabulary(tokenizer.to_str(), VOCAB_SIZE, [EOS])


@pytest.fixture(scope="module")
def loaded(
    llama_folder: Path, tokenizer: tokenizers.Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> startup.LoadedModel:
    folder = tmp_path_factory.mktemp("models") / "spelling"
    shutil.copytree(llama_folder, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return startup.load(WORKER_CONFIG, folder, "float32", "")


class Failing:
    """The model, with a forward pass that can be made to fail."""

    def __init__(self, model: object) -> None:
        self._model = model
        self.fails = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def forward(self, *inputs: object) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("broken")
        return self._model.forward(*inputs)


@pytest.fixture
def model(loaded: startup.LoadedModel) -> Failing:
    return Failing(loaded.decoder)


@pytest.fixture
def runner(loaded: startup.LoadedModel, model: Failing) -> ModelRunner:
    return startup.build_runner(WORKER_CONFIG, dataclasses.replace(loaded, decoder=model), 64)


def sampled(grammar: str, seed: int = 0, **fields: object) -> RowSampling:
    return RowSampling(temperature=1.0, seed=seed, grammar=grammar, **fields)


def column(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


class Requests:
    """Runs sequences in slots of their own until each has ended, as a scheduler would."""

    def __init__(self, runner: ModelRunner, *samplings: RowSampling, prompt: int = 9) -> None:
        self.runner = runner
        self.samplings = samplings
        self.prompts = [make_prompt(prompt, seed=7 + slot) for slot in range(len(samplings))]
        self.outputs: list[list[int]] = [[] for _ in samplings]
        self.step_id = 0

    def enter(self, slot: int) -> NewSequence:
        return NewSequence(
            slot=slot,
            request_id=f"request-{slot}",
            token_ids=np.array(self.prompts[slot] + self.outputs[slot], dtype=np.int32),
            num_prompt_tokens=len(self.prompts[slot]),
            num_computed_tokens=0,
            block_ids=np.arange(1 + 12 * slot, 13 + 12 * slot, dtype=np.int32),
            sampling=self.samplings[slot],
        )

    def step(self, rows: dict[int, int], **fields: object) -> StepOutput:
        self.step_id += 1
        slots, counts = column(*rows), column(*rows.values())
        step = StepInput(step_id=self.step_id, slots=slots, num_scheduled=counts, **fields)
        return self.runner.execute(step)

    def take(self, slots: list[int], output: StepOutput) -> None:
        assert not output.error and output.row_status is None, (output.error, output.row_errors)
        for slot, token_id in zip(slots, output.token_ids.tolist(), strict=True):
            self.outputs[slot].append(token_id)

    def begin(self) -> None:
        slots = list(range(len(self.samplings)))
        rows = {slot: len(self.prompts[slot]) for slot in slots}
        new = tuple(self.enter(slot) for slot in slots)
        self.take(slots, self.step(rows, reset=True, new_sequences=new))

    def unfinished(self) -> list[int]:
        return [
            slot
            for slot, output in enumerate(self.outputs)
            if len(output) < 60 and (not output or output[-1] != EOS)
        ]

    def decode(self) -> None:
        slots = self.unfinished()
        self.take(slots, self.step(dict.fromkeys(slots, 1)))

    def run(self) -> list[list[int]]:
        self.begin()
        while self.unfinished():
            self.decode()
        return self.outputs


@pytest.fixture
def say(tokenizer: tokenizers.Tokenizer) -> Callable[[list[int]], str]:
    return lambda token_ids: tokenizer.decode(token_ids)


def test_outputs_follow_their_grammars_and_end_where_those_are_complete(
    runner: ModelRunner, say: Callable[[list[int]], str]
) -> None:
    for seed in range(12):
        numbers, objects, sums = Requests(
            runner, sampled(DIGITS, seed), sampled(OBJECT, seed), sampled(SUMS, seed)
        ).run()
        assert re.fullmatch("[0-9]{3,9}", say(numbers))
        found = json.loads(say(objects))
        assert list(found) in (["abc", "n"], ["abc", "a", "n"])
        assert type(found["abc"]) is bool and -3 <= found["n"] <= 120
        assert re.fullmatch(r"[0-9]{1,2}(\+[0-9]{1,2})*\+?", say(sums))
        assert all(output[-1] == EOS for output in (numbers, objects))
        assert EOS not in [*numbers[:-1], *objects[:-1]]


SAMPLINGS = (sampled(OBJECT, 3), sampled(SUMS, 4, min_p=0.01), sampled(OBJECT, 5, top_k=9))


@pytest.fixture
def calm(runner: ModelRunner) -> list[list[int]]:
    return Requests(runner, *SAMPLINGS).run()


def test_a_grammar_row_says_the_same_alone_and_in_a_batch(
    runner: ModelRunner, calm: list[list[int]]
) -> None:
    assert [Requests(runner, SAMPLINGS[0]).run()[0]] == calm[:1]


def test_chunks_of_a_prompt_change_nothing(runner: ModelRunner, calm: list[list[int]]) -> None:
    chunked = Requests(runner, *SAMPLINGS)
    new = tuple(chunked.enter(slot) for slot in range(3))
    chunked.step({0: 4, 1: 9, 2: 1}, reset=True, new_sequences=new)
    output = chunked.step({0: 5, 2: 8})
    chunked.take([0, 2], output)
    chunked.outputs[1] = calm[1][:1]
    while chunked.unfinished():
        chunked.decode()
    assert chunked.outputs == calm


@pytest.mark.parametrize("num_before", [1, 4, 7])
def test_a_preempted_sequence_goes_on_as_if_nothing_had_happened(
    runner: ModelRunner, calm: list[list[int]], num_before: int
) -> None:
    requests = Requests(runner, *SAMPLINGS)
    requests.begin()
    for _ in range(num_before - 1):
        requests.decode()
    again = [slot for slot in (0, 2) if slot in requests.unfinished()]
    others = [slot for slot in requests.unfinished() if slot not in again]
    rows = {slot: len(requests.prompts[slot]) + len(requests.outputs[slot]) for slot in again}
    new = tuple(requests.enter(slot) for slot in again)
    output = requests.step(
        dict.fromkeys(others, 1) | rows, freed_slots=column(*again), new_sequences=new
    )
    requests.take([*others, *again], output)
    while requests.unfinished():
        requests.decode()
    assert requests.outputs == calm


def test_steps_that_fail_leave_no_trace_in_a_matcher(
    runner: ModelRunner, model: Failing, calm: list[list[int]]
) -> None:
    requests = Requests(runner, *SAMPLINGS)
    requests.begin()
    while slots := requests.unfinished():
        model.fails = True
        for _ in range(2):
            assert requests.step(dict.fromkeys(slots, 1)).error == "RuntimeError: broken"
        model.fails = False
        requests.decode()
    assert requests.outputs == calm


def test_a_matcher_moved_on_allows_what_one_built_anew_does(vocabulary: Vocabulary) -> None:
    generator = np.random.default_rng(0)
    grammars = Grammars(VOCAB_SIZE, lambda: vocabulary)

    def allowed(place: GrammarPlace, token_ids: list[int]) -> np.ndarray:
        num_unread = column(len(token_ids))
        rows = grammars.fill(column(0), [place], num_unread, lambda: column(*token_ids))
        filled = rows.filling.result()
        assert filled.problems == {}
        return np.flatnonzero(np.unpackbits(filled.allowed[0], bitorder="little"))

    for text in (DIGITS, OBJECT, SUMS) * 5:
        moved, output = grammars.begin(text, []), []
        choices = allowed(moved, [])
        for _ in range(25):
            token_id = int(generator.choice(choices))
            if token_id == EOS:
                break
            output.append(token_id)
            choices = allowed(moved, [token_id])
            assert choices.tolist() == allowed(grammars.begin(text, output), []).tolist()


def test_masks_that_the_library_cannot_fill_end_their_row_alone(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = Grammars(VOCAB_SIZE, lambda: vocabulary)
    grammars.fill_for(torch.device("cpu"), 4)
    places = [grammars.begin(text, []) for text in (DIGITS, OBJECT, SUMS)]
    broken = places[1].building.result()
    fill_one = llguidance.numpy.fill_next_token_bitmask

    def panic(*_: object) -> None:
        raise BaseException("a panic of the library")

    def one(matcher: Matcher, masks: np.ndarray, index: int) -> None:
        if matcher is broken:
            panic()
        fill_one(matcher, masks, index)

    def step() -> tuple[np.ndarray, dict[int, str]]:
        rows = grammars.fill(np.arange(3), places, np.zeros(3, dtype=np.int64), column)
        return rows.on(torch.device("cpu")).numpy(), rows.problems()

    whole, problems = step()
    assert problems == {} and whole.any(1).all()
    monkeypatch.setattr(llguidance.numpy, "fill_next_token_bitmask_par", panic)
    monkeypatch.setattr(llguidance.numpy, "fill_next_token_bitmask", one)
    for num_timed in (0, 1):  # together, and one after the other
        grammars._masks._num_to_time = num_timed
        masks, problems = step()
        assert problems.keys() == {1} and "a panic of the library" in problems[1]
        assert (masks[[0, 2]] == whole[[0, 2]]).all() and not masks[1].any()


def test_outputs_do_not_use_up_each_others_limits(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = llguidance.LLParserLimits(max_lexer_states=500, verbose_errors=False)
    monkeypatch.setattr(wire.grammar, "LIMITS", limits)
    words = Matcher.grammar_from_regex("([a-m]{3,40}x|[n-z]{2,90}y|[a-f]{1,30}[u-z]{1,40}){1,60}")
    grammars, dice = Grammars(VOCAB_SIZE, lambda: vocabulary), np.random.default_rng(1)
    for _ in range(100):
        place, last = grammars.begin(words, []), column()
        for _ in range(30):
            rows = grammars.fill(column(0), [place], column(len(last)), last.copy)
            filled = rows.filling.result()
            assert filled.problems == {}
            mask = np.unpackbits(filled.allowed[0], bitorder="little")
            last = column(int(dice.choice(np.flatnonzero(mask))))
            if last[0] == EOS:
                break


def test_a_slow_grammar_delays_no_other(
    vocabulary: Vocabulary, tokenizer: tokenizers.Tokenizer
) -> None:
    source = VocabularySource(tokenizer.to_str, VOCAB_SIZE, [EOS])
    checks = GrammarChecks(source, CheckLimits(quick_s=0.03))
    with contextlib.closing(checks):
        grammars = Grammars(VOCAB_SIZE, lambda: vocabulary, checks)
        grammars.begin(SUMS, []).building.result()
        slow_ones = [json.dumps(hostile.crossed(name)) for name in "abc"]
        slow = [grammars.begin(Matcher.grammar_from_json_schema(one), []) for one in slow_ones]
        grammars.begin(DIGITS, []).building.result()
        assert not all(place.building.done() for place in slow)
        for place in slow:
            place.building.result()
        assert all(map(checks.knows_as_slow, map(Matcher.grammar_from_json_schema, slow_ones)))
        assert not checks.knows_as_slow(DIGITS)


def test_rows_without_a_grammar_are_as_without_those_that_have_one(
    runner: ModelRunner, greedy: Greedy
) -> None:
    requests = Requests(runner, RowSampling(), sampled(OBJECT), RowSampling(), sampled(DIGITS))
    requests.begin()
    for _ in range(9):
        requests.take([0, 1, 2, 3], requests.step(dict.fromkeys(range(4), 1)))
    for slot in (0, 2):
        assert requests.outputs[slot] == greedy(requests.prompts[slot], 10)


def test_log_probabilities_are_those_of_the_model_and_not_of_the_grammar(
    runner: ModelRunner,
) -> None:
    free = Requests(runner, RowSampling(num_top_logprobs=3))
    bound = Requests(runner, sampled(DIGITS, num_top_logprobs=3))
    found = []
    for requests in (free, bound):
        rows = {0: len(requests.prompts[0])}
        output = requests.step(rows, reset=True, new_sequences=(requests.enter(0),))
        assert output.logprobs is not None
        found.append(output.logprobs.top_logprobs[0].tolist())
    assert found[0] == found[1]


ENDLESS = sampled(Matcher.grammar_from_regex("a+"))


def dead_ends() -> Iterator[tuple[str, RowSampling, int, str]]:
    yield "grammar", sampled("start: nothing"), 1, 'unknown name: "nothing"'
    yield "min_tokens", sampled(DIGITS, min_tokens=99, stop_token_ids=(EOS,)), 10, NO_TOKEN_LEFT
    yield "allowed", sampled(DIGITS, allowed_token_ids=(EOS,)), 1, NO_TOKEN_LEFT
    bad_words = ((67,), (106,), (107,))  # a, ab, abc
    only_a = Matcher.grammar_from_regex("abc+")
    yield "bad words", sampled(only_a, bad_words_token_ids=bad_words), 1, NO_TOKEN_LEFT
    costly = Matcher.grammar_from_regex("(((ab?){1,100}c?){1,100}d?){1,100}x")
    too_many = "lexer error: too many expressions constructed"
    yield "too costly", sampled(costly, allowed_token_ids=(67,)), 60, too_many


@pytest.mark.parametrize(
    ("sampling", "most_steps", "problem"),
    [pytest.param(*case[1:], id=case[0]) for case in dead_ends()],
)
def test_a_row_with_no_token_left_says_why_and_the_others_go_on(
    runner: ModelRunner, sampling: RowSampling, most_steps: int, problem: str
) -> None:
    requests = Requests(runner, ENDLESS, sampling)
    new = tuple(requests.enter(slot) for slot in range(2))
    output = requests.step({0: 9, 1: 9}, reset=True, new_sequences=new)
    for _ in range(most_steps - 1):
        if output.row_status is None:
            output = requests.step({0: 1, 1: 1})
    assert output.error == ""
    assert output.row_status is not None and output.row_status.tolist() == [0, ROW_DEAD_END]
    assert problem in output.row_errors[1]
    assert requests.step({0: 1}).row_status is None


def test_without_a_tokenizer_a_grammar_is_refused_by_name(llama_folder: Path) -> None:
    loaded = startup.load(WORKER_CONFIG, llama_folder, "float32", "")
    requests = Requests(startup.build_runner(WORKER_CONFIG, loaded, 64), sampled(DIGITS))
    output = requests.step({0: 9}, reset=True, new_sequences=(requests.enter(0),))
    assert output.row_errors == {0: "grammar: the model folder has no tokenizer.json"}


def test_a_vocabulary_without_an_end_or_a_tokenizer_is_refused(
    tokenizer: tokenizers.Tokenizer,
) -> None:
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        read_vocabulary(tokenizer.to_str(), VOCAB_SIZE, [])
    with pytest.raises(ValueError, match="tokenizer does not fit"):
        read_vocabulary("{}", VOCAB_SIZE, [EOS])
