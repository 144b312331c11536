"""Grammars are checked in processes that may die of them; the one that asks never does."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from gateway.structure.structure import JsonSchema
from tests import hostile_grammars as hostile
from tests.pace import patience
from tests.worker_svc.spelling import EOS, SUMS, VOCAB_SIZE, make_tokenizer
from wire.forks.limits import CheckLimits
from wire.grammar import BadGrammar, BadVocabulary, GrammarTooLarge
from wire.grammar_check.checks import GrammarChecks, SlowGrammar, VocabularySource

SOURCE = VocabularySource(make_tokenizer().to_str, VOCAB_SIZE, [EOS])


@pytest.fixture(scope="module")
def checks() -> Iterator[GrammarChecks]:
    checks = GrammarChecks(SOURCE)
    yield checks
    checks.close()


def limited(**limits: float) -> GrammarChecks:
    return GrammarChecks(SOURCE, CheckLimits(**limits))  # type: ignore[arg-type]


def test_a_good_grammar_is_checked_once(checks: GrammarChecks) -> None:
    assert not checks.knows(SUMS)
    checks.check(SUMS)
    before = checks.num_checked
    checks.check(SUMS)
    assert checks.knows(SUMS) and checks.num_checked == before


def test_many_who_ask_at_once_wait_for_one_check(checks: GrammarChecks) -> None:
    before, grammar = checks.num_checked, hostile.chained_rules(50)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(checks.check, [grammar] * 8))
    assert checks.num_checked == before + 1


def test_a_bad_grammar_is_refused_with_its_problem(checks: GrammarChecks) -> None:
    for _ in range(2):
        with pytest.raises(BadGrammar, match="missing") as raised:
            checks.check("start: missing")
        assert not isinstance(raised.value, GrammarTooLarge)


def test_a_grammar_that_overflows_the_stack_is_refused_and_not_tried_again(
    checks: GrammarChecks,
) -> None:
    grammar = hostile.chained_rules(5_000)
    with pytest.raises(GrammarTooLarge, match="nested too deeply"):
        checks.check(grammar)
    before = checks.num_checked
    with pytest.raises(GrammarTooLarge, match="nested too deeply"):
        checks.check(grammar)
    assert checks.num_checked == before
    checks.check(SUMS)  # the next one is checked as ever


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"wall_s": 0.001}, "more than 0.001 s to be read"),
        ({"memory_mib": 1}, "more than 1 MiB of memory"),
        ({"stack_mib": 1}, "nested too deeply"),
    ],
)
def test_each_limit_is_told_apart(limits: dict[str, float], reason: str) -> None:
    checks = limited(**limits)
    with pytest.raises(GrammarTooLarge, match=reason):
        checks.check(hostile.chained_rules(1_000) + f"# {'x' * (4 << 20)}\n")
    checks.close()


def test_a_quick_check_gives_up_and_a_full_one_answers_for_good() -> None:
    checks = limited(quick_s=0.001)
    grammar = hostile.chained_rules(1_000) + f"# {'x' * (1 << 20)}\n"
    for _ in range(2):
        with pytest.raises(SlowGrammar):
            checks.check(grammar, is_quick=True)
    assert checks.num_checked == 1 and not checks.knows(grammar) and checks.knows_as_slow(grammar)
    checks.check(grammar)
    assert checks.knows(grammar) and checks.knows_as_slow(grammar)
    checks.check(grammar, is_quick=True)
    assert checks.num_checked == 2
    with pytest.raises(SlowGrammar):
        checks.find([grammar], "any", is_quick=True)
    checks.close()


def test_a_quick_check_does_not_wait_for_a_full_one_of_the_same_grammar() -> None:
    checks = limited()
    grammar = JsonSchema("form", hostile.crossed("x")).to_grammar()
    checks.prepare()
    with ThreadPoolExecutor(1) as pool:
        full = pool.submit(checks.check, grammar)
        while not checks.num_checked:
            pass
        with pytest.raises(SlowGrammar):
            checks.check(grammar, is_quick=True)
        full.result()
    checks.close()


def test_the_first_of_many_with_a_problem_is_found(checks: GrammarChecks) -> None:
    problem = 'unknown name: "missing"'
    with pytest.raises(BadGrammar) as raised:
        checks.check("start: missing")
    problem = str(raised.value)
    assert checks.find([SUMS, 'start: "a"', "start: missing", "start: missing"], problem) == 2
    assert checks.find([SUMS, "start: other"], problem) is None
    assert checks.find([hostile.chained_rules(5_000), "start: missing"], problem) is None


def test_a_checking_process_that_was_killed_is_replaced() -> None:
    checks = limited()
    checks.check(SUMS)
    assert checks._process is not None
    os.kill(checks._process.process.pid, signal.SIGKILL)
    checks._process.process.wait(patience(10))
    checks.check(SUMS + "\n")
    checks.close()


def test_a_tokenizer_that_does_not_fit_is_told() -> None:
    checks = GrammarChecks(VocabularySource(lambda: "{}", VOCAB_SIZE, [EOS]))
    with pytest.raises(BadVocabulary):
        checks.check(SUMS)
