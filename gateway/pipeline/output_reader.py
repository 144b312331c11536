"""Converts the arrivals of one output to the deltas that its client receives. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.chat.answer import AnswerReader
from gateway.errors.request_errors import ErrorKind, RequestError, invalid
from gateway.request.generation import Finish, FinishReason, OutputDelta, Usage
from gateway.scheduler.live_request import TokenArrival
from gateway.text.logprobs import LogprobReader
from gateway.text.output_text import OutputText
from gateway.text.prompt_outputs import PromptOutputReader


@dataclass(slots=True)
class OutputReader:
    """Reads the arrivals of one output; fields that were not requested are None."""

    text: OutputText
    num_prompt_tokens: int
    logprobs: LogprobReader | None
    answer: AnswerReader | None  # of a chat
    prompt_reader: PromptOutputReader | None
    counts_usage: bool = False  # with every delta

    def catch_up(self, token_ids: Sequence[int]) -> None:
        """Advances past the tokens that the client of a broken stream has already.

        Raises RequestError when they end with a stop string.
        """
        piece = self.text.push(list(token_ids))
        if piece.stop_string is not None:
            raise invalid("resume_token_ids", "the output had ended with a stop string")
        if self.logprobs is not None:
            for token_id in token_ids:
                self.logprobs.skip(token_id)
        if self.answer is not None:
            self.answer.push(piece.text, is_last=False)
            self._count_reasoning(piece.text, token_ids)
        self.prompt_reader = None  # the prompt was reported before the first token

    @property
    def num_values(self) -> int:
        """Number of the prompt's log probabilities that the next arrival brings."""
        return 0 if self.prompt_reader is None else self.prompt_reader.num_values

    def read(self, arrival: TokenArrival, num_cached_tokens: int) -> OutputDelta:
        """The delta for new tokens, and the end if it came with them."""
        delta = self._read_text(arrival, num_cached_tokens)
        if self.prompt_reader is not None:  # the first arrival has all prompt outputs
            delta, self.prompt_reader = _with_prompt(delta, self.prompt_reader, arrival), None
        if self.logprobs is not None:
            delta = _with_logprobs(delta, self.logprobs, arrival)
        if self.answer is not None:
            is_complete = delta.finish is not None and delta.finish.reason is FinishReason.STOP
            parts = self.answer.push(
                delta.text, is_last=delta.finish is not None, is_complete=is_complete
            )
            self._count_reasoning(delta.text, delta.token_ids)
            delta = delta._replace(parts=parts, finish=self._with_reasoning(delta.finish))
        if self.counts_usage:
            delta = delta._replace(usage=self._usage(num_cached_tokens))
        return delta

    @property
    def _num_reasoning_tokens(self) -> int:
        thought = None if self.answer is None else self.answer.thought
        return 0 if thought is None else min(thought.count, self.text.num_tokens)

    def _usage(self, num_cached_tokens: int) -> Usage:
        num_tokens, num_reasoning = self.text.num_tokens, self._num_reasoning_tokens
        return Usage(self.num_prompt_tokens, num_tokens, num_cached_tokens, num_reasoning)

    def _with_reasoning(self, finish: Finish | None) -> Finish | None:
        if finish is None or not self._num_reasoning_tokens:
            return finish
        usage = replace(finish.usage, num_reasoning_tokens=self._num_reasoning_tokens)
        return replace(finish, usage=usage)

    def _count_reasoning(self, text: str, token_ids: Sequence[int]) -> None:
        if self.answer is not None and self.answer.thought is not None:
            self.answer.thought.add(text, len(token_ids))

    def _read_text(self, arrival: TokenArrival, num_cached_tokens: int) -> OutputDelta:
        piece, end = self.text.push(arrival.token_ids), arrival.end
        text, stop_string = piece.text, piece.stop_string
        if end is not None and stop_string is None:
            rest = self.text.flush()
            text, stop_string = text + rest.text, rest.stop_string
        if stop_string is not None:
            usage = self._usage(num_cached_tokens)
            end = Finish(FinishReason.STOP, usage, stop_string=stop_string)
        return OutputDelta(text, piece.token_ids, end)


def _with_prompt(
    delta: OutputDelta, prompt_reader: PromptOutputReader, arrival: TokenArrival
) -> OutputDelta:
    if delta.finish is not None and delta.finish.reason is FinishReason.ABORT:
        return delta  # it may precede the end of the prompt
    return delta._replace(prompt=prompt_reader.combine(arrival.prompt_outputs))


def _with_logprobs(delta: OutputDelta, reader: LogprobReader, arrival: TokenArrival) -> OutputDelta:
    if len(arrival.logprobs) < len(arrival.token_ids):
        raise RequestError(ErrorKind.INTERNAL, "the scheduler sent tokens without logprobs")
    delta = delta._replace(logprobs=reader.read(delta.token_ids, arrival.logprobs))
    if delta.finish is None:
        return delta
    return delta._replace(finish=replace(delta.finish, cumulative_logprob=reader.total))
