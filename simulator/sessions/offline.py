"""A cache of a given size, and the tokens it computes if turns are served in order, in no time.

Evicted is what is used next farthest in the future (the optimum: no policy that serves the turns in
this order, one at a time, computes less), or what was used longest ago. A turn keeps its own
context while it is served. Of a text the end goes first: without its beginning it is never found.
"""

import heapq
import math
from collections import deque
from dataclasses import dataclass
from enum import Enum

from simulator.sessions.trace import SessionTrace, SessionTurn


class Evict(Enum):
    """The text that gives way first."""

    FARTHEST = "farthest next use"
    OLDEST = "longest unused"


@dataclass(frozen=True, slots=True)
class ComputedTokens:
    """The prompt tokens of a trace, and those of them that had to be computed."""

    num_prompt_tokens: int
    num_computed_tokens: int


def ideal(trace: SessionTrace, block_size: int) -> ComputedTokens:
    """The tokens that a boundless cache computes."""
    return replay(trace, block_size, None, Evict.OLDEST)


def replay(
    trace: SessionTrace, block_size: int, num_blocks: int | None, evict: Evict
) -> ComputedTokens:
    """The tokens that a cache of so many blocks computes; None: of as many as there are."""
    room = None if num_blocks is None else num_blocks * block_size
    cache, num_prompt, num_computed = _Cache(trace, block_size, evict), 0, 0
    for number, turn in enumerate(trace.turns):
        num_prompt += turn.prompt_tokens
        num_computed += turn.prompt_tokens - cache.find(turn)
        cache.store(number, turn)
        if room is not None:
            cache.shrink(room, turn)
    return ComputedTokens(num_prompt, num_computed)


class _Cache:
    """The tokens of each text that are held, and the order in which texts give way."""

    def __init__(self, trace: SessionTrace, block_size: int, evict: Evict) -> None:
        self._block_size = block_size
        self._evict = evict
        self._num_tokens = 0
        self._held: dict[int, int] = {}  # tokens by text
        self._uses: dict[int, deque[int]] = {}  # the turns that are still to come, by text
        for number, turn in enumerate(trace.turns):
            for piece in turn.pieces:
                self._uses.setdefault(piece.text, deque()).append(number)
        self._rank: dict[int, float] = {}
        self._by_rank: list[tuple[float, int]] = []  # and what was true of a text before

    def find(self, turn: SessionTurn) -> int:
        """Number of a prompt's tokens that are held: whole blocks, and not its last token."""
        found = 0
        for piece in turn.pieces:
            here = min(self._held.get(piece.text, 0), piece.num_tokens)
            found += here
            if here < piece.num_tokens:
                break
        return self._whole_blocks(min(found, turn.prompt_tokens - 1))

    def store(self, number: int, turn: SessionTurn) -> None:
        """Holds a turn's whole context, which is used now; its last token has no KV."""
        *shared, own = turn.pieces
        before = sum(piece.num_tokens for piece in shared)
        end = self._whole_blocks(before + own.num_tokens + turn.output_tokens - 1)
        for piece in shared:
            self._hold(piece.text, piece.num_tokens)
        self._hold(own.text, max(end - before, 0))
        for place, piece in enumerate(turn.pieces):
            uses = self._uses[piece.text]
            assert uses.popleft() == number
            # Of texts used by one turn the later gives way first.
            oldest = number - place / len(turn.pieces)
            farthest = -uses[0] if uses else -math.inf
            rank = oldest if self._evict is Evict.OLDEST else farthest
            self._rank[piece.text] = rank
            heapq.heappush(self._by_rank, (rank, piece.text))

    def shrink(self, room: int, turn: SessionTurn) -> None:
        """Drops tokens of texts that this turn does not read until at most `room` are held."""
        pinned, kept = {piece.text for piece in turn.pieces}, []
        while self._num_tokens > room and self._by_rank:
            rank, text = entry = heapq.heappop(self._by_rank)
            if self._rank[text] != rank or not self._held.get(text):
                continue
            if text in pinned:
                kept.append(entry)
                continue
            surplus = -(-(self._num_tokens - room) // self._block_size) * self._block_size
            num_dropped = min(surplus, self._held[text])
            self._held[text] -= num_dropped
            self._num_tokens -= num_dropped
            kept.append(entry)
        for entry in kept:
            heapq.heappush(self._by_rank, entry)

    def _hold(self, text: int, num_tokens: int) -> None:
        known = self._held.get(text, 0)
        if num_tokens > known:
            self._held[text] = num_tokens
            self._num_tokens += num_tokens - known

    def _whole_blocks(self, num_tokens: int) -> int:
        return num_tokens // self._block_size * self._block_size
