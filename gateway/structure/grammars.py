"""Converts structures to grammars and checks that a worker of this model can apply them."""

import asyncio
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from gateway.errors import RequestError, invalid, unsupported
from gateway.structure import json_schema
from gateway.structure.structure import CallList, JsonSchema, Structure
from wire.grammar import BadGrammar, BadVocabulary, Vocabulary, new_matcher, read_vocabulary

MAX_KNOWN_GRAMMARS = 256


class GrammarChecker:
    """Checks grammars against the model's vocabulary, off the event loop."""

    def __init__(self, tokenizer: Callable[[], str]) -> None:
        self._tokenizer = tokenizer  # the content of its tokenizer.json
        self._vocabulary = lru_cache(1)(self._read_vocabulary)
        self._check_once = lru_cache(MAX_KNOWN_GRAMMARS)(self._check)

    async def resolve(
        self, structure: Structure, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> str:
        """The grammar of a structure. Raises RequestError naming the place at fault."""
        return await asyncio.to_thread(self._resolve, structure, vocab_size, eos_token_ids)

    def _resolve(
        self, structure: Structure, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> str:
        grammar = structure.to_grammar()
        check = partial(self._check_once, vocab_size, eos_token_ids)
        try:
            check(grammar)
        except BadVocabulary as error:
            field = structure.place.partition(".")[0]
            raise unsupported(field, f"is not supported for this model: {error}") from error
        except BadGrammar as error:
            raise self._refusal(structure, str(error), check) from error
        return grammar

    def _refusal(
        self, structure: Structure, problem: str, check: Callable[[str], None]
    ) -> RequestError:
        if isinstance(structure, CallList):
            for _, schema in structure.functions:
                try:
                    check(schema.to_grammar())
                except BadGrammar as error:
                    return self._refusal(schema, str(error), check)
        if not isinstance(structure, JsonSchema):
            return invalid(structure.place, problem)

        def problem_of(part: Any) -> str | None:
            try:
                check(structure.grammar_of(part))
            except BadGrammar as error:
                return str(error)
            return None

        return json_schema.refusal(structure.schema, structure.place, problem, problem_of)

    def _check(self, vocab_size: int, eos_token_ids: tuple[int, ...], grammar: str) -> None:
        new_matcher(self._vocabulary(vocab_size, eos_token_ids), grammar)

    def _read_vocabulary(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Vocabulary:
        return read_vocabulary(self._tokenizer(), vocab_size, eos_token_ids)
