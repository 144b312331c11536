"""A grammar that takes long to check delays no other caller's, and its caller's are bounded."""

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from gateway.callers.auth import CLIENT
from gateway.callers.grammar_budgets import GrammarLimits
from gateway.errors.request_errors import ErrorKind, RequestError
from gateway.structure.grammars import GrammarChecker
from gateway.structure.structure import JsonSchema, Regex
from tests import hostile_grammars as hostile
from tests.worker_svc.spelling import EOS, VOCAB_SIZE, make_tokenizer
from wire.forks.limits import CheckLimits

QUICK = CheckLimits(quick_s=0.03)
SMALL = JsonSchema("form", {"type": "object", "properties": {"a": {"type": "integer"}}})


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker(make_tokenizer().to_str, check_limits=QUICK)
    yield checker
    checker.close()


def resolve(
    checker: GrammarChecker, structure: JsonSchema | Regex, client: str
) -> asyncio.Task[str]:
    """A check under way for a client."""
    token = CLIENT.set(client)
    try:
        return asyncio.create_task(checker.resolve(structure, VOCAB_SIZE, (EOS,)))
    finally:
        CLIENT.reset(token)


def slow(name: str) -> JsonSchema:
    return JsonSchema("form", hostile.crossed(name))


async def test_a_small_grammar_does_not_wait_for_slow_ones(checker: GrammarChecker) -> None:
    await resolve(checker, SMALL, "warm")
    heavy = [resolve(checker, slow(f"x{i}"), "heavy") for i in range(3)]
    await asyncio.sleep(0)
    for text in "ab":
        await resolve(checker, Regex("form", text), "other")
    assert not all(task.done() for task in heavy)
    assert all(await asyncio.gather(*heavy))


async def test_slow_grammars_of_one_client_are_bounded_and_equal_ones_count_once() -> None:
    checker = GrammarChecker(make_tokenizer().to_str, GrammarLimits(max_slow_per_client=1), QUICK)
    with contextlib.closing(checker):
        slow_ones = [resolve(checker, slow(name), "one") for name in "xxy"]
        done = await asyncio.gather(*slow_ones, return_exceptions=True)
        refused = [one for one in done if isinstance(one, RequestError)]
        assert refused and (done[0] in refused) == (done[1] in refused)
        for error in refused:
            assert error.kind is ErrorKind.OVERLOADED and error.field == "form"
            assert "--max-slow-grammars-per-client is 1" in error.message


async def test_too_many_free_properties_are_refused_before_anything_is_built(
    checker: GrammarChecker,
) -> None:
    await resolve(checker, SMALL, "one")
    assert checker._checks is not None
    before = checker._checks[1].num_checked
    inner = hostile.many_properties(2_300)
    with pytest.raises(RequestError, match="2300 may be left out, at most 450") as caught:
        await resolve(checker, JsonSchema("form", {"items": inner}), "one")
    assert caught.value.field == "form.items.properties"
    assert checker._checks[1].num_checked == before


async def test_2300_properties_that_must_come_are_served(checker: GrammarChecker) -> None:
    await resolve(checker, JsonSchema("form", hostile.many_required(2_300)), "one")


async def test_a_schema_that_only_describes_too_much_stands_for_any_object(
    checker: GrammarChecker,
) -> None:
    described = JsonSchema("form", hostile.many_properties(2_300), is_loose=True)
    plain = JsonSchema("form", {"type": "object"}, is_loose=True)
    assert await resolve(checker, described, "one") == await resolve(checker, plain, "one")
    deep = JsonSchema("form", hostile.chained_references(3_000), is_loose=True)
    assert await resolve(checker, deep, "one") == plain.to_grammar()
