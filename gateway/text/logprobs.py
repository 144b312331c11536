"""Log probabilities of output tokens, with the text of each token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.errors.request_errors import ErrorKind, RequestError
from gateway.text.detokenizer import Detokenizer
from wire.logprobs import LogprobColumns

Spell = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """The values of one token as the scheduler sends them."""

    logprob: float
    rank: int  # 1: the likeliest
    top_token_ids: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token and its log probability."""

    token_id: int
    logprob: float
    rank: int  # 1: the likeliest; of tokens that the request names, their place among these
    spelling: bytes  # the bytes that it adds to the text, possibly an incomplete character


@dataclass(frozen=True, slots=True)
class OutputTokenLogprobs:
    """A token of the output with its likeliest alternatives."""

    sampled: Candidate
    top: tuple[Candidate, ...]  # likeliest first, or as named; may include the sampled token
    text_offset: int  # number of characters of the output before it
    is_named: bool = False  # the request names the alternatives


def num_values(tokens: Sequence[OutputTokenLogprobs]) -> int:
    """Number of log probabilities; each token of an output has as many."""
    return len(tokens) * (1 + len(tokens[0].top)) if tokens else 0


def raw_logprobs(table: LogprobColumns) -> list[RawLogprobs]:
    """The rows of a table."""
    columns = table.logprobs, table.ranks, table.top_token_ids, table.top_logprobs
    return list(map(RawLogprobs, *(column.tolist() for column in columns)))


class LogprobReader:
    """Adds text to the log probabilities of one output, token by token."""

    def __init__(
        self,
        spell: Spell,
        detokenizer: Detokenizer,
        num_top: int,
        text_offset: int = 0,
        named: tuple[int, ...] = (),
    ) -> None:
        self._spell = spell
        self._detokenizer = detokenizer
        self._num_top = len(named) or num_top
        self._named = named  # reported in place of the likeliest; empty: those
        self._num_characters = text_offset  # before the next token
        self.total: float | None = 0.0  # of all tokens; None: some were skipped

    def skip(self, token_id: int) -> None:
        """Advances past a token without log probabilities."""
        self.total = None
        self._num_characters += len(self._detokenizer.push((token_id,)))

    def read(
        self, token_ids: Sequence[int], raw: Sequence[RawLogprobs]
    ) -> tuple[OutputTokenLogprobs, ...]:
        """The values of new output tokens; more rows in `raw` were cut off by a stop string.

        Raises RequestError for values of other tokens than those named.
        """
        return tuple(map(self._read, token_ids, raw))

    def _read(self, token_id: int, raw: RawLogprobs) -> OutputTokenLogprobs:
        offset = self._num_characters
        self._num_characters += len(self._detokenizer.push((token_id,)))
        if self._named and tuple(raw.top_token_ids[: self._num_top]) != self._named:
            problem = "the scheduler or its worker is older than logprob_token_ids"
            raise RequestError(ErrorKind.INTERNAL, problem)
        pairs = zip(raw.top_token_ids, raw.top_logprobs, strict=True)
        top = tuple(
            Candidate(top_id, logprob, index + 1, self._spell(top_id))
            for index, (top_id, logprob) in enumerate(pairs)
            if index < self._num_top
        )
        if self.total is not None:
            self.total += raw.logprob
        sampled = Candidate(token_id, raw.logprob, raw.rank, self._spell(token_id))
        return OutputTokenLogprobs(sampled, top, offset, bool(self._named))
