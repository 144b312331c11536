"""Fork groups: requests for several outputs of one prompt.

A group lives as long as one of its requests does. All have the same prompt, so that one computes it
and the others copy its KV.
"""

import numpy as np

from scheduler_svc.core.request.request import Request
from scheduler_svc.core.request.sequence import Sequence

_Key = tuple[str, str, str]
_ALIKE = ("skip_prefix_cache", "adapter_id", "extras")  # what KV depends on besides the prompt


class ForkGroups:
    """Live sequences by fork group."""

    def __init__(self) -> None:
        self._groups: dict[_Key, list[Sequence]] = {}

    def problem(self, request: Request) -> str | None:
        """Why a request cannot join its fork group; None when it can, or names none."""
        members = self._groups.get(_key(request)) if request.fork_group else None
        if not members:
            return None
        other = members[0].request
        if not np.array_equal(request.prompt_token_ids, other.prompt_token_ids):
            return f"fork_group {request.fork_group!r} is live with another prompt"
        for name in _ALIKE:
            if getattr(request, name) != getattr(other, name):
                return f"fork_group {request.fork_group!r} is live with another {name}"
        return None

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence to its group; one that migrated here and conflicts stays alone."""
        if sequence.request.fork_group and self.problem(sequence.request) is None:
            self._groups.setdefault(_key(sequence.request), []).append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that has ended."""
        members = self.of(sequence)
        if members:
            members.remove(sequence)
            if not members:
                del self._groups[_key(sequence.request)]

    def of(self, sequence: Sequence) -> list[Sequence]:
        """The live members of a sequence's group, itself included; empty if it is in none."""
        request = sequence.request
        members = self._groups.get(_key(request), []) if request.fork_group else []
        return members if sequence in members else []

    def has_group_of(self, request: Request) -> bool:
        """True if the fork group that a request names is live here."""
        return bool(request.fork_group) and _key(request) in self._groups

    def clear(self) -> None:
        """Removes all sequences."""
        self._groups.clear()


def _key(request: Request) -> _Key:
    return request.tenant, request.cache_salt, request.fork_group
