"""The sessions that clients have named, and the branches of their blocks.

A session is known as long as it has a branch of its own, so there are never more of them than
blocks and running sequences.
"""

from scheduler_svc.core.kv.branches import NO_BRANCH
from scheduler_svc.core.request.session_hint import SessionKey


class NamedSessions:
    """The branch of each session that has a name."""

    def __init__(self) -> None:
        self._branch: dict[SessionKey, int] = {}
        self._key: dict[int, SessionKey] = {}

    def __len__(self) -> int:
        return len(self._branch)

    def branch_of(self, key: SessionKey | None) -> int:
        """The branch of a session; NO_BRANCH when it has none."""
        return NO_BRANCH if key is None else self._branch.get(key, NO_BRANCH)

    def is_other(self, key: SessionKey | None, name: int) -> bool:
        """True if a branch is that of a session with another name."""
        own = self._key.get(name)
        return None not in (key, own) and own != key

    def name_of(self, name: int) -> str:
        """The client's name of the session of a branch; empty without one."""
        key = self._key.get(name)
        return "" if key is None else key[1]

    def tell(self, key: SessionKey, name: int) -> None:
        """Notes that a session goes on in this branch, and no other does."""
        if self._branch.get(key) != name:
            self.forget(self._branch.get(key, NO_BRANCH))
            self.forget(name)
            self._branch[key], self._key[name] = name, key

    def forget(self, name: int) -> None:
        """Forgets the session of a branch, if it has one."""
        key = self._key.pop(name, None)
        if key is not None:
            del self._branch[key]
