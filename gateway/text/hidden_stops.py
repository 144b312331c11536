"""Stop strings that hold special tokens which the output's client does not see. Pure.

In the text that is matched such a token is one character that no text contains, half a surrogate
pair. It is taken out before the text is shown.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.text.stops import Pattern

_FIRST, _END = 0xD800, 0xE000  # of the halves: more than tokens in all stop strings of a request


@dataclass(frozen=True, slots=True)
class HiddenStops:
    """The patterns of stop strings with hidden tokens, and the characters of these tokens."""

    patterns: tuple[Pattern, ...] = ()
    marks: Mapping[int, str] | None = None  # by token id; None: there are none

    def shown(self, text: str) -> str:
        """The text without these characters."""
        if not self.marks:
            return text
        return text.translate(dict.fromkeys(map(ord, self.marks.values())))


NO_HIDDEN_STOPS = HiddenStops()


def hidden_stops(stops: Sequence[str], hidden: Mapping[str, int]) -> HiddenStops:
    """The stop strings that are or hold hidden tokens; the longest token counts."""
    whole = "\n".join(stops)
    present = [text for text in hidden if text and text in whole]
    if not present:
        return NO_HIDDEN_STOPS
    present.sort(key=len, reverse=True)
    chars = {text: chr(at) for at, text in zip(range(_FIRST, _END), present, strict=False)}
    token = re.compile("|".join(map(re.escape, chars)))
    patterns = [Pattern(token.sub(lambda m: chars[m[0]], stop), stop) for stop in stops]
    return HiddenStops(
        tuple(one for one in patterns if one.text != one.stop),
        {hidden[text]: char for text, char in chars.items()},
    )
