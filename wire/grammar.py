"""Parses grammars in the same way for gateway and worker, so that both accept the same ones.

A grammar is a text for llguidance. Nothing is compiled in advance: a matcher is at a position in a
grammar, which depends only on the grammar and the tokens read since its start.
"""

import json
from collections.abc import Sequence

import llguidance

LLGUIDANCE_VERSION: str = llguidance.__version__
MAX_GRAMMAR_BYTES = 1 << 20

# Bounds on the cost of one grammar: some ten milliseconds per mask, and 100 MB. A matcher that
# exceeds one is in error from then on, and says so. docs/decisions/0013 has what each one costs.
LIMITS = llguidance.LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=300_000,
    step_lexer_fuel=50_000,
    step_max_items=30_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
# Without it, text that only one string can continue is cut into the tokenizer's own tokens; a text
# that spells a special token becomes that token, which the grammar then refuses.
_UNFORCED = '%llguidance {"no_forcing": true}'
NUM_PROBED_TOKENS = 2  # after which some grammars prove too complex that began well

Vocabulary = llguidance.LLTokenizer
Matcher = llguidance.LLMatcher


class BadVocabulary(ValueError):
    """Raised for a tokenizer that grammars cannot be matched against."""


class BadGrammar(ValueError):
    """Raised for a grammar that cannot be followed; the message says why."""


class GrammarTooLarge(BadGrammar):
    """Raised for a grammar that exceeds a limit as a whole: no part of it is at fault."""


_PASSED_ON = (KeyboardInterrupt, SystemExit, BadVocabulary, BadGrammar)  # what nothing renames


def read_vocabulary(definition: str, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
    """The bytes of every token id, from the content of a tokenizer.json.

    End-of-sequence ids end every grammar. Raises BadVocabulary.
    """
    if not eos_token_ids:
        raise BadVocabulary("the model names no end-of-sequence token")
    with FailuresAs(BadVocabulary, "the model's tokenizer does not fit"):
        return Vocabulary(definition, n_vocab=vocab_size, eos_token=list(eos_token_ids))


def new_matcher(vocabulary: Vocabulary, grammar: str) -> Matcher:
    """A matcher at the start of a grammar. Raises BadGrammar."""
    with FailuresAs(BadGrammar, "it cannot be read"):
        matcher = Matcher(vocabulary, _unforced(grammar), log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise BadGrammar(problem_of(matcher))
        matcher.compute_bitmask()  # some grammars prove too complex only here
    if matcher.is_error():
        raise GrammarTooLarge(problem_of(matcher))
    return matcher


def _unforced(grammar: str) -> str:
    """The same grammar, Lark or a JSON list of grammars, with the option that applies to all."""
    if not grammar.lstrip().startswith("{"):
        return f"{grammar}\n{_UNFORCED}\n"
    try:
        parts = json.loads(grammar)
        first, *others = parts["grammars"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return grammar  # the library says what is wrong with it
    first = {**first, "name": first.get("name") or "grammar"}
    start = {"name": "unforced", "lark_grammar": f"{_UNFORCED}\nstart: @{first['name']}\n"}
    return json.dumps({**parts, "grammars": [start, first, *others]})


def check(vocabulary: Vocabulary, grammar: str) -> None:
    """Builds a matcher and takes its first steps. Raises BadGrammar.

    Nothing bounds the stack, memory and time that this may take: for a grammar of unknown origin
    call it in a process that may die (`wire.grammar_check`).
    """
    matcher = new_matcher(vocabulary, grammar)
    with FailuresAs(BadGrammar, "it cannot be followed"):
        for _ in range(NUM_PROBED_TOKENS):
            allowed = int.from_bytes(matcher.compute_bitmask(), "little")
            for token_id in vocabulary.eos_tokens:
                allowed &= ~(1 << token_id)
            if not allowed or matcher.is_stopped():
                break
            matcher.consume_token((allowed & -allowed).bit_length() - 1)
    if matcher.is_error():
        raise GrammarTooLarge(problem_of(matcher))


def problem_of(matcher: Matcher) -> str:
    """Why a matcher cannot continue."""
    return matcher.get_error().removesuffix("<non-verbose/>").strip()


class FailuresAs:
    """Raises errors and panics of the Rust library as `kind`; a panic is not an Exception."""

    __slots__ = ("_kind", "_what")

    # A class, not a generator: each row of each step enters it, and this takes a tenth of the time.
    def __init__(self, kind: type[Exception], what: str) -> None:
        self._kind = kind
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None or isinstance(error, _PASSED_ON):
            return
        raise self._kind(f"{self._what}: {error}") from error
