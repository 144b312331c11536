"""Bounds the grammars that take long and wait to be checked, of one client and of all."""

from collections import Counter
from dataclasses import dataclass, field

from gateway.errors.request_errors import ErrorKind, RequestError


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Bounds of the different grammars that wait for a full check, or are in one."""

    max_slow: int = 32
    max_slow_per_client: int = 4


DEFAULT_LIMITS = GrammarLimits()


@dataclass(slots=True)
class SlowGrammars:
    """The grammars that wait for a full check, or are in one, by client and key."""

    limits: GrammarLimits
    _waiting: dict[str, Counter[bytes]] = field(default_factory=dict)

    def enter(self, client: str, key: bytes, place: str) -> None:
        """Counts one. Raises RequestError beyond a limit."""
        own = self._waiting.get(client, Counter[bytes]())
        option = None
        if key not in own and len(own) >= self.limits.max_slow_per_client:
            option, most = "--max-slow-grammars-per-client", self.limits.max_slow_per_client
        elif key not in own and sum(map(len, self._waiting.values())) >= self.limits.max_slow:
            option, most = "--max-slow-grammars", self.limits.max_slow
        if option is not None:
            problem = f"too many grammars that take long wait to be checked, {option} is {most}"
            raise RequestError(ErrorKind.OVERLOADED, f"{place}: {problem}", field=place)
        own[key] += 1
        self._waiting[client] = own

    def leave(self, client: str, key: bytes) -> None:
        """Counts one less."""
        own = self._waiting[client]
        own[key] -= 1
        if not own[key]:
            del own[key]
        if not own:
            del self._waiting[client]
