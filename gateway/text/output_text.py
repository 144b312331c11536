"""The text of one output: detokenizer and stop strings combined, token by token. Pure."""

from typing import NamedTuple

from gateway.text.detokenizer import Detokenizer
from gateway.text.hidden_stops import NO_HIDDEN_STOPS, HiddenStops
from gateway.text.stops import StopMatcher
from gateway.text.stretches import Stretches


class Piece(NamedTuple):
    """The text and tokens that some tokens added."""

    text: str
    token_ids: list[int]  # up to the one that completed a stop string
    stop_string: str | None = None


class OutputText:
    """Converts an output's tokens to the text that its client sees.

    Stop strings are matched from token min_tokens + 1 on; with stretches, in the answer alone.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopMatcher | None,
        min_tokens: int = 0,
        stretches: Stretches | None = None,
        hidden: HiddenStops = NO_HIDDEN_STOPS,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self._stretches = stretches
        self._hidden = hidden
        self.num_tokens = 0

    def push(self, token_ids: list[int]) -> Piece:
        """Adds tokens. A piece with a stop_string is the last one."""
        if self._stops is None:
            self.num_tokens += len(token_ids)
            return Piece(self._detokenizer.push(token_ids), token_ids)
        shown, marks = [], self._hidden.marks or {}
        # One by one: the output ends with the very token that completed the stop string.
        for index, token_id in enumerate(token_ids):
            self.num_tokens += 1
            text = self._detokenizer.push((token_id,)) + marks.get(token_id, "")
            text, stop_string = self._match(text, self._stops)
            shown.append(text)
            if stop_string is not None:
                return Piece("".join(shown), token_ids[: index + 1], stop_string)
        return Piece("".join(shown), token_ids)

    def _match(
        self, text: str, stops: StopMatcher, *, is_last: bool = False
    ) -> tuple[str, str | None]:
        """The text to show now, and the stop string that ended it or None."""
        may_stop = self.num_tokens > self._min_tokens
        if self._stretches is None:
            text, stop_string = stops.push(text, may_stop=may_stop)
            return self._hidden.shown(text), stop_string
        shown, stop_string = "", None
        for stretch in self._stretches.push(text, is_last=is_last):
            if not stretch.is_answer:
                shown += stops.skip(stretch.text)
                continue
            text, stop_string = stops.push(stretch.text, may_stop=may_stop)
            shown += text
            if stop_string is not None:
                break
        return self._hidden.shown(shown), stop_string

    def flush(self) -> Piece:
        """The text withheld so far, after the last token was pushed."""
        text = self._detokenizer.flush()
        if self._stops is None:
            return Piece(text, [])
        text, stop_string = self._match(text, self._stops, is_last=True)
        if stop_string is not None:
            return Piece(text, [], stop_string)
        return Piece(text + self._hidden.shown(self._stops.flush()), [])
