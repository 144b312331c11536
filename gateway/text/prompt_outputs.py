"""Prompt outputs for the client: the prompt itself, and its log probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.errors.request_errors import ErrorKind, RequestError
from gateway.text.detokenizer import Detokenizer
from gateway.text.logprobs import (
    LogprobReader,
    OutputTokenLogprobs,
    Spell,
    num_values,
    raw_logprobs,
)
from wire.prompt_outputs import PromptOutput


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
class PromptOutputs:
    """Prompt outputs, delivered with the first piece of an output."""

    token_ids: tuple[int, ...]
    scores: PromptScores | None  # None: not requested
    echo: Echo | None

    @property
    def num_values(self) -> int:
        """About how many numbers and texts an answer tells of it."""
        both = self.scores, None if self.echo is None else self.echo.scores
        told = [scores.others for scores in both if scores is not None]
        return len(self.token_ids) + sum(num_values(others) for others in told)


@dataclass(frozen=True, slots=True)
class PromptOutputOptions:
    """The prompt outputs that a request asks for."""

    num_top: int | None  # alternatives per token; None: no scores
    echo: str | None  # the prompt's text, if it precedes the output
    num_echo_top: int | None  # alternatives per token of the echo; None: no scores

    @property
    def most_top(self) -> int | None:
        """Alternatives to request from the scheduler; None: no scores are needed."""
        wanted = self.num_top, self.num_echo_top if self.echo is not None else None
        return max((number for number in wanted if number is not None), default=None)


class PromptOutputReader:
    """Combines the outputs of one prompt."""

    def __init__(
        self,
        wanted_outputs: PromptOutputOptions,
        token_ids: Sequence[int],
        spell: Spell,
        detokenizer: Detokenizer,
    ) -> None:
        self._wanted = wanted_outputs
        self._token_ids = token_ids
        self._spell = spell
        self._detokenizer = detokenizer

    @property
    def num_values(self) -> int:
        """Number of log probabilities that `combine` reads."""
        most_top = self._wanted.most_top
        return 0 if most_top is None else len(self._token_ids) * (1 + most_top)

    def combine(self, prompt_outputs: Sequence[PromptOutput]) -> PromptOutputs:
        """The requested outputs. Raises RequestError unless the reports cover the prompt."""
        wanted_outputs, scores = self._wanted, None
        if wanted_outputs.most_top is not None:
            scores = self._read(prompt_outputs, wanted_outputs.most_top)
        echo = None
        if wanted_outputs.echo is not None:
            echo = Echo(wanted_outputs.echo, _cut(scores, wanted_outputs.num_echo_top))
        return PromptOutputs(tuple(self._token_ids), _cut(scores, wanted_outputs.num_top), echo)

    def _read(self, prompt_outputs: Sequence[PromptOutput], num_top: int) -> PromptScores:
        first, *others = self._token_ids
        reader = LogprobReader(self._spell, self._detokenizer, num_top)
        reader.skip(first)
        tokens: list[OutputTokenLogprobs] = []
        for prompt_output in prompt_outputs:
            if prompt_output.begin != len(tokens) or prompt_output.logprobs is None:
                raise RequestError(ErrorKind.INTERNAL, "the scheduler reported the wrong tokens")
            behind = others[prompt_output.begin : prompt_output.end]
            tokens += reader.read(behind, raw_logprobs(prompt_output.logprobs))
        if len(tokens) != len(others):
            problem = f"the scheduler reported {len(tokens)} of {len(others) + 1} prompt tokens"
            raise RequestError(ErrorKind.INTERNAL, problem)
        return PromptScores(self._spell(first), tuple(tokens))


def _cut(scores: PromptScores | None, num_top: int | None) -> PromptScores | None:
    return None if scores is None or num_top is None else scores.with_top(num_top)
