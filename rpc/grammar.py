"""How a grammar is read. Gateway and worker do it alike, so what one accepts the other can follow.

A grammar is a text of llguidance. Nothing is compiled ahead: a matcher holds a place in a grammar,
and that place is a function of the grammar and the tokens read since its start.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import llguidance

LLGUIDANCE_VERSION: str = llguidance.__version__
MAX_GRAMMAR_BYTES = 1 << 20

# Bounds on what one grammar may cost: tens of milliseconds to build or for a mask, and 100 MB.
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)

Vocabulary = llguidance.LLTokenizer
Matcher = llguidance.LLMatcher


class BadVocabulary(ValueError):
    """A tokenizer that grammars cannot be matched against."""


class BadGrammar(ValueError):
    """A grammar that cannot be followed; says why."""


def read_vocabulary(definition: str, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
    """The bytes behind every token id, from the text of a tokenizer.json.

    End-of-sequence ids stand for the end of every grammar.
    """
    if not eos_token_ids:
        raise BadVocabulary("the model names no end-of-sequence token")
    with failures_as(BadVocabulary, "the model's tokenizer does not fit"):
        return Vocabulary(definition, n_vocab=vocab_size, eos_token=list(eos_token_ids))


def new_matcher(vocabulary: Vocabulary, grammar: str) -> Matcher:
    """A matcher at the start of a grammar; raises BadGrammar."""
    with failures_as(BadGrammar, "it cannot be read"):
        matcher = Matcher(vocabulary, grammar, log_level=0, limits=LIMITS)
        matcher.compute_bitmask()  # some grammars turn out to be too complex only here
    if matcher.is_error():
        raise BadGrammar(problem_of(matcher))
    return matcher


def problem_of(matcher: Matcher) -> str:
    """Why a matcher cannot go on."""
    return matcher.get_error().removesuffix("<non-verbose/>").strip()


@contextmanager
def failures_as(kind: type[Exception], what: str) -> Iterator[None]:
    """A panic of the Rust library is no Exception: unless it becomes one, it ends a thread."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, BadVocabulary, BadGrammar):
        raise
    except BaseException as error:
        raise kind(f"{what}: {error}") from error
