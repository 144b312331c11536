"""Random outputs within the masks of a grammar."""

import random
from collections.abc import Sequence

import numpy as np

from wire.grammar import Matcher


def walk(
    matcher: Matcher, closing: Sequence[int], dice: random.Random, *, detours: float, most: int
) -> list[int] | None:
    """The tokens of one output; None if it has not ended after so many.

    `closing` has the end of an output first, and then tokens that bring it closer. A share of
    `detours` of all steps takes any token that the mask allows.
    """
    end, *_ = closing
    token_ids: list[int] = []
    while len(token_ids) < most:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        assert not matcher.is_error(), matcher.get_error()
        allowed = np.unpackbits(mask, bitorder="little").view(bool)
        choices = [token_id for token_id in closing if allowed[token_id]]
        if not choices or dice.random() < detours:
            choices = np.flatnonzero(allowed).tolist()
        token_id = dice.choice(choices)
        if token_id == end:
            return token_ids
        token_ids.append(token_id)
        assert matcher.consume_token(token_id), matcher.get_error()
    return None
