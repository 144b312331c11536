"""Outputs of requests that have ended, for drafts of others of the same tenant and salt.

Bounded by the number of requests and of tokens; the oldest go first. Requests share these as they
share cached prefixes: with the same tenant and `cache_salt` alone, and not at all if they skip the
prefix cache.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from scheduler_svc.core import Request, Sequence
from scheduler_svc.core.request.request import TokenIds

MAX_TOKENS = 1 << 20  # of all tenants together
MAX_TOKENS_OF_ONE = 1 << 16  # of one tenant and salt: each look-up reads them all
SEPARATOR = -1  # between outputs; no token is equal to it
NONE: TokenIds = np.zeros(0, dtype=np.int32)

_Owner = tuple[str, str]  # tenant and salt


@dataclass(slots=True)
class _Outputs:
    """The outputs of one tenant and salt, each with a separator after it."""

    parts: deque[TokenIds] = field(default_factory=deque)  # oldest first
    joined: TokenIds | None = None  # all of them; None: not joined yet

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.parts))


class PastOutputs:
    """The newest outputs, at most `max_requests`."""

    def __init__(self, max_requests: int, num_before: int) -> None:
        """With each output, `num_before` tokens of its prompt are kept."""
        self._max_requests = max_requests
        self._num_before = num_before
        self._by_owner: dict[_Owner, _Outputs] = {}
        self._order: deque[_Owner] = deque()  # of the outputs, oldest first
        self._num_tokens = 0

    def of(self, request: Request) -> TokenIds:
        """The outputs that a request may draft from, oldest first; they end with separators."""
        outputs = None if request.skip_prefix_cache else self._by_owner.get(_owner(request))
        if outputs is None:
            return NONE
        if outputs.joined is None:
            outputs.joined = np.concatenate([*outputs.parts])
        return outputs.joined

    def add(self, sequence: Sequence) -> None:
        """Keeps the output of a sequence that has ended."""
        request = sequence.request
        if not self._max_requests or request.skip_prefix_cache or not sequence.num_output:
            return
        begin = max(sequence.num_prompt - self._num_before, 0)
        part = np.append(sequence.token_ids[begin:], SEPARATOR)[-MAX_TOKENS_OF_ONE:]
        owner = _owner(request)
        outputs = self._by_owner.setdefault(owner, _Outputs())
        outputs.parts.append(part.astype(np.int32))
        outputs.joined = None
        self._order.append(owner)
        self._num_tokens += len(part)
        while outputs.num_tokens > MAX_TOKENS_OF_ONE:
            self._order.remove(owner)
            self._drop_oldest(owner)
        while len(self._order) > self._max_requests or self._num_tokens > MAX_TOKENS:
            self._drop_oldest(self._order.popleft())

    def _drop_oldest(self, owner: _Owner) -> None:
        outputs = self._by_owner[owner]
        self._num_tokens -= len(outputs.parts.popleft())
        outputs.joined = None
        if not outputs.parts:
            del self._by_owner[owner]


def _owner(request: Request) -> _Owner:
    return request.tenant, request.cache_salt
