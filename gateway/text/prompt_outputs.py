"""Prompt outputs for the client: the prompt itself, and its log probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.errors import ErrorKind, RequestError
from gateway.text.detokenizer import Detokenizer
from gateway.text.logprobs import LogprobReader, OutputTokenLogprobs, Spell, raw_logprobs
from wire.prompt_outputs import PromptReport


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log probability of each token of a prompt after the tokens before it."""

    first_spelling: bytes  # of the first token, which has no log probability
    others: tuple[OutputTokenLogprobs, ...]

    def with_top(self, num_top: int) -> "PromptScores":
        """The same with at most `num_top` alternatives."""
        others = (replace(token, top=token.top[:num_top]) for token in self.others)
        return replace(self, others=tuple(others))


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that precedes its output."""

    text: str
    scores: PromptScores | None  # None: not requested


@dataclass(frozen=True, slots=True)
class PromptTold:
    """Prompt outputs, delivered with the first piece of an output."""

    token_ids: tuple[int, ...]
    scores: PromptScores | None  # None: not requested
    echo: Echo | None


@dataclass(frozen=True, slots=True)
class PromptWish:
    """The prompt outputs that a request asks for."""

    num_top: int | None  # alternatives per token; None: no scores
    echo: str | None  # the prompt's text, if it precedes the output
    num_echo_top: int | None  # alternatives per token of the echo; None: no scores

    @property
    def most_top(self) -> int | None:
        """Alternatives to request from the scheduler; None: no scores are needed."""
        wanted = self.num_top, self.num_echo_top if self.echo is not None else None
        return max((number for number in wanted if number is not None), default=None)


class PromptTeller:
    """Combines the reports on one prompt."""

    def __init__(
        self, wish: PromptWish, token_ids: Sequence[int], spell: Spell, detokenizer: Detokenizer
    ) -> None:
        self._wish = wish
        self._token_ids = token_ids
        self._spell = spell
        self._detokenizer = detokenizer

    def tell(self, reports: Sequence[PromptReport]) -> PromptTold:
        """The requested outputs. Raises RequestError unless the reports cover the prompt."""
        wish, scores = self._wish, None
        if wish.most_top is not None:
            scores = self._read(reports, wish.most_top)
        echo = None
        if wish.echo is not None:
            echo = Echo(wish.echo, _cut(scores, wish.num_echo_top))
        return PromptTold(tuple(self._token_ids), _cut(scores, wish.num_top), echo)

    def _read(self, reports: Sequence[PromptReport], num_top: int) -> PromptScores:
        first, *others = self._token_ids
        reader = LogprobReader(self._spell, self._detokenizer, num_top)
        reader.skip(first)
        tokens: list[OutputTokenLogprobs] = []
        for report in reports:
            if report.begin != len(tokens) or report.logprobs is None:
                raise RequestError(ErrorKind.INTERNAL, "the scheduler reported the wrong tokens")
            behind = others[report.begin : report.end]
            tokens += reader.read(behind, raw_logprobs(report.logprobs))
        if len(tokens) != len(others):
            problem = f"the scheduler reported {len(tokens)} of {len(others) + 1} prompt tokens"
            raise RequestError(ErrorKind.INTERNAL, problem)
        return PromptScores(self._spell(first), tuple(tokens))


def _cut(scores: PromptScores | None, num_top: int | None) -> PromptScores | None:
    return None if scores is None or num_top is None else scores.with_top(num_top)
