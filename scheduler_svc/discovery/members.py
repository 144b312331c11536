"""The addresses of worker groups and who names them; the engine adds and drains accordingly.

An address may be named by several sources, and is drained when the last of them takes it back. An
operator's word goes before theirs: what an operator drained or removed stays so until an operator
adds it, or until no source names it any more.
"""

from scheduler_svc.engine import Engine

STATIC, OPERATOR = "--worker", "operator"
MAX_MEMBERS = 1024  # each has a channel and a loop of its own


class TooManyWorkers(Exception):
    """Raised when no further address is taken."""


class Members:
    """The sources of each address."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sources: dict[str, set[str]] = {
            address: {STATIC} for address in engine.config.workers
        }
        self._held: set[str] = set()  # by an operator

    def named_by(self, source: str) -> set[str]:
        """The addresses that this source names."""
        return {address for address, sources in self._sources.items() if source in sources}

    def join(self, address: str, source: str, server_name: str = "") -> None:
        """A source names an address. Raises TooManyWorkers."""
        sources = self._sources.get(address)
        if sources is None:
            if len(self._sources) >= MAX_MEMBERS:
                raise TooManyWorkers(f"{address} would be one more than {MAX_MEMBERS} workers")
            sources = self._sources[address] = set()
        is_new = not sources
        sources.add(source)
        if is_new and address not in self._held:
            self._engine.add_group(address, source, server_name)

    def leave(self, address: str, source: str, why: str) -> None:
        """A source takes an address back; without any left its group is drained."""
        sources = self._sources.get(address, set())
        if source not in sources:
            return
        sources.remove(source)
        if not sources:
            del self._sources[address]
            self._held.discard(address)
            self._engine.drain_group(address, why)

    # --- operators -------------------------------------------------------------------------------

    def add(self, address: str) -> None:
        """Adds a group at an operator's word, or ends its drain. Raises TooManyWorkers."""
        was_held = address in self._held
        self._held.discard(address)
        known = set(self._sources.get(address, ()))
        self.join(address, OPERATOR)
        if known and was_held:
            self._engine.add_group(address, ", ".join(sorted(known | {OPERATOR})))

    def drain(self, address: str) -> bool:
        """Drains a group and keeps it; False when there is none."""
        return self._hold(address, "an operator has drained it", is_kept=True)

    def remove(self, address: str) -> bool:
        """Drains a group and removes it when it is empty; False when there is none."""
        return self._hold(address, "an operator has removed it", is_kept=False)

    def _hold(self, address: str, why: str, *, is_kept: bool) -> bool:
        if not self._engine.drain_group(address, why, is_kept=is_kept):
            return False
        sources = self._sources.get(address, set())
        sources.discard(OPERATOR)
        if sources:
            self._held.add(address)
        elif not is_kept:
            self._sources.pop(address, None)
        return True
