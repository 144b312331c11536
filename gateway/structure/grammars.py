"""Converts structures to grammars and checks that a worker of this model can apply them.

Callers take turns. A grammar whose check takes longer than a quick one waits apart, in turns too,
so that nothing else waits for it.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gateway.callers.auth import CLIENT
from gateway.callers.grammar_budgets import DEFAULT_LIMITS, GrammarLimits, SlowGrammars
from gateway.callers.lanes import Lane
from gateway.errors.request_errors import RequestError, invalid, unavailable, unsupported
from gateway.structure import json_schema
from gateway.structure.calls import AnyStructure, CallsInAnswer
from gateway.structure.structure import ANY_OBJECT, CallList, JsonSchema
from gateway.structure.tags import Asked, StructuralTags
from gateway.structure.thinking import ThoughtFirst
from wire.forks.limits import CheckLimits
from wire.grammar import BadGrammar, BadVocabulary, GrammarTooLarge
from wire.grammar_check.checks import ChecksLost, GrammarChecks, SlowGrammar, VocabularySource

NUM_QUICK_THREADS = 2  # threads of their own, so that tokenizing never waits for a grammar
NUM_SLOW_THREADS = 2


class GrammarChecker:
    """Checks grammars against the model's vocabulary, in another process."""

    def __init__(
        self,
        tokenizer: Callable[[], str],
        limits: GrammarLimits = DEFAULT_LIMITS,
        check_limits: CheckLimits | None = None,
    ) -> None:
        self._tokenizer = tokenizer  # the content of its tokenizer.json
        self._check_limits = check_limits
        self._quick = Lane("grammars", NUM_QUICK_THREADS)
        self._slow = Lane("slow-grammars", NUM_SLOW_THREADS)
        self._slow_ones = SlowGrammars(limits)
        self._lock = threading.Lock()
        self._checks: tuple[tuple[int, tuple[int, ...]], GrammarChecks] | None = None

    def close(self) -> None:
        """Ends the checking process."""
        if self._checks is not None:
            self._checks[1].close()

    async def resolve(
        self,
        structure: AnyStructure | ThoughtFirst,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
    ) -> str:
        """The grammar of a structure. Raises RequestError naming the place at fault."""
        client = CLIENT.get()
        resolve = partial(self._resolve, structure, vocab_size, eos_token_ids)
        try:
            return await self._quick.run(client, partial(resolve, is_quick=True))
        except SlowGrammar as slow:
            key = slow.key
        self._slow_ones.enter(client, key, structure.place)
        leave = partial(self._slow_ones.leave, client, key)
        return await self._slow.run(client, partial(resolve, is_quick=False), leave)

    def _resolve(
        self,
        structure: AnyStructure | ThoughtFirst,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        *,
        is_quick: bool,
    ) -> str:
        """The grammar. Raises SlowGrammar if `is_quick` and a check is not."""
        grammar = structure.to_grammar()
        try:
            checks = _Checks(self._checks_of(vocab_size, eos_token_ids), is_quick)
            checks.check(grammar)
        except BadVocabulary as error:
            place = structure.place.partition(".")[0]
            raise unsupported(place, f"is not supported for this model: {error}") from error
        except BadGrammar as error:
            looser = _without_failing(structure, checks)
            if looser != structure:
                return self._resolve(looser, vocab_size, eos_token_ids, is_quick=is_quick)
            if isinstance(error, GrammarTooLarge):
                raise invalid(structure.place, str(error)) from error
            raise _refusal(structure, str(error), checks) from error
        except ChecksLost as error:
            raise unavailable(str(error)) from error
        return grammar

    def _checks_of(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> GrammarChecks:
        key = (vocab_size, eos_token_ids)
        with self._lock:
            if self._checks is None or self._checks[0] != key:
                self.close()
                source = VocabularySource(self._tokenizer, vocab_size, eos_token_ids)
                self._checks = key, GrammarChecks(source, self._check_limits)
            return self._checks[1]


@dataclass(frozen=True, slots=True)
class _Checks:
    """The checks of one kind."""

    checks: GrammarChecks
    is_quick: bool

    def check(self, grammar: str) -> None:
        """Raises as `GrammarChecks.check` does."""
        self.checks.check(grammar, is_quick=self.is_quick)

    def find(self, grammars: Iterable[str], problem: str) -> int | None:
        """The index of the first grammar with this problem; None if there is none."""
        return self.checks.find(grammars, problem, is_quick=self.is_quick)


def _without_failing(
    structure: AnyStructure | ThoughtFirst, checks: _Checks
) -> AnyStructure | ThoughtFirst:
    """The same with any object in place of loose schemas that no grammar can hold."""
    if not isinstance(structure, ThoughtFirst):
        return _held(structure, checks)
    if structure.answer is None:
        return structure
    return replace(structure, answer=_held(structure.answer, checks))


def _held(structure: AnyStructure, checks: _Checks) -> AnyStructure:
    if isinstance(structure, JsonSchema):
        return structure if _can_be_held(structure, checks) else _any_object(structure)
    if not isinstance(structure, (CallList, CallsInAnswer)):
        return structure
    functions = tuple(
        (name, schema if _can_be_held(schema, checks) else _any_object(schema))
        for name, schema in structure.functions
    )
    return replace(structure, functions=functions)


def _any_object(schema: JsonSchema) -> JsonSchema:
    return replace(schema, schema=ANY_OBJECT)


def _can_be_held(schema: JsonSchema, checks: _Checks) -> bool:
    if not schema.is_loose or schema.schema == ANY_OBJECT:
        return True
    try:
        checks.check(schema.to_grammar())
    except BadGrammar:
        return False
    return True


def _refusal(structure: AnyStructure | ThoughtFirst, problem: str, checks: _Checks) -> RequestError:
    if isinstance(structure, ThoughtFirst):
        if structure.answer is None:
            return invalid(structure.place, problem)
        structure = structure.answer
    for part in _parts(structure):
        try:
            checks.check(part.to_grammar())
        except BadGrammar as error:
            return _refusal(part, str(error), checks)
    if not isinstance(structure, JsonSchema):
        return invalid(structure.place, problem)

    def find(parts: Iterable[Any]) -> int | None:
        return checks.find(map(structure.grammar_of, parts), problem)

    return json_schema.refusal(structure.schema, structure.place, problem, find)


def _parts(structure: AnyStructure) -> list[Asked]:
    """The schemas and forms inside a structure."""
    if isinstance(structure, StructuralTags):
        return [*structure.parts()]
    if not isinstance(structure, (CallList, CallsInAnswer)):
        return []
    parts: list[Asked] = [schema for _, schema in structure.functions]
    if isinstance(structure, CallsInAnswer) and structure.form is not None:
        parts.append(structure.form)
    return parts
