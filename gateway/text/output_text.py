"""The text of one output: detokenizer and stop strings combined, token by token. Pure."""

from typing import NamedTuple

from gateway.text.detokenizer import Detokenizer
from gateway.text.stops import StopMatcher


class Piece(NamedTuple):
    """The text and tokens that some tokens added."""

    text: str
    token_ids: list[int]  # up to the one that completed a stop string
    stop_string: str | None = None


class OutputText:
    """Converts an output's tokens to the text that its client sees.

    Stop strings are matched from token min_tokens + 1 on.
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: StopMatcher | None, min_tokens: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self.num_tokens = 0

    def push(self, token_ids: list[int]) -> Piece:
        """Adds tokens. A piece with a stop_string is the last one."""
        if self._stops is None:
            self.num_tokens += len(token_ids)
            return Piece(self._detokenizer.push(token_ids), token_ids)
        shown = []
        # One by one: the output ends with the very token that completed the stop string.
        for index, token_id in enumerate(token_ids):
            self.num_tokens += 1
            text = self._detokenizer.push((token_id,))
            may_stop = self.num_tokens > self._min_tokens
            text, stop_string = self._stops.push(text, may_stop=may_stop)
            shown.append(text)
            if stop_string is not None:
                return Piece("".join(shown), token_ids[: index + 1], stop_string)
        return Piece("".join(shown), token_ids)

    def flush(self) -> Piece:
        """The text withheld so far, after the last token was pushed."""
        text = self._detokenizer.flush()
        if self._stops is None:
            return Piece(text, [])
        text, stop_string = self._stops.push(text, may_stop=self.num_tokens > self._min_tokens)
        if stop_string is not None:
            return Piece(text, [], stop_string)
        return Piece(text + self._stops.flush(), [])
