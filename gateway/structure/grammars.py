"""Converts structures to grammars and checks that a worker of this model can apply them."""

import asyncio
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from gateway.errors import RequestError, invalid, unavailable, unsupported
from gateway.structure import json_schema
from gateway.structure.structure import CallList, JsonSchema, Structure
from wire.grammar import BadGrammar, BadVocabulary
from wire.grammar_check.checks import ChecksLost, GrammarChecks, VocabularySource

MAX_WAITING_CHECKS = 16  # threads of their own, so that tokenizing never waits for a grammar


class GrammarChecker:
    """Checks grammars against the model's vocabulary, in another process."""

    def __init__(self, tokenizer: Callable[[], str]) -> None:
        self._tokenizer = tokenizer  # the content of its tokenizer.json
        self._threads = ThreadPoolExecutor(MAX_WAITING_CHECKS, "grammars")
        self._lock = threading.Lock()
        self._checks: tuple[tuple[int, tuple[int, ...]], GrammarChecks] | None = None
        weakref.finalize(self, self._threads.shutdown, wait=False, cancel_futures=True)

    def close(self) -> None:
        """Ends the checking process."""
        if self._checks is not None:
            self._checks[1].close()

    async def resolve(
        self, structure: Structure, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> str:
        """The grammar of a structure. Raises RequestError naming the place at fault."""
        resolve = partial(self._resolve, structure, vocab_size, eos_token_ids)
        return await asyncio.get_running_loop().run_in_executor(self._threads, resolve)

    def _resolve(
        self, structure: Structure, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> str:
        grammar = structure.to_grammar()
        try:
            check = self._checks_of(vocab_size, eos_token_ids).check
            check(grammar)
        except BadVocabulary as error:
            field = structure.place.partition(".")[0]
            raise unsupported(field, f"is not supported for this model: {error}") from error
        except BadGrammar as error:
            raise self._refusal(structure, str(error), check) from error
        except ChecksLost as error:
            raise unavailable(str(error)) from error
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

    def _checks_of(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> GrammarChecks:
        key = (vocab_size, eos_token_ids)
        with self._lock:
            if self._checks is None or self._checks[0] != key:
                self.close()
                source = VocabularySource(self._tokenizer, vocab_size, eos_token_ids)
                self._checks = key, GrammarChecks(source)
            return self._checks[1]
