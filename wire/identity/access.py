"""Decides whether a call is permitted: by API key, peer token or client certificate."""

import hmac
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from wire.identity.keys import Caller, KeyRing
from wire.identity.roles import METHOD_ROLES, Role
from wire.identity.watched import Watched

SCHEME = "bearer"
MIN_TOKEN_CHARS = 16
PEER = Caller("a service", None, frozenset({Role.USER, Role.OPERATOR, Role.PEER}))

# Of the call that the current task serves; None where no identity is asked for.
CALLER: ContextVar[Caller | None] = ContextVar("CALLER", default=None)


class AccessDenied(Exception):
    """Raised for a call that is not permitted.

    `is_known` tells a caller without the role from one without a valid key or token.
    """

    def __init__(self, message: str, *, is_known: bool) -> None:
        super().__init__(message)
        self.message = message
        self.is_known = is_known


@dataclass(frozen=True, slots=True)
class Access:
    """The callers that a server accepts. At least one of the three is set."""

    keys: Callable[[], KeyRing] | None = None
    peer_tokens: Callable[[], tuple[str, ...]] | None = None
    by_certificate: bool = False  # a connection without a certificate of a peer does not come here

    def identify(self, authorization: str | None) -> Caller:
        """Who calls, by the header of that name. Raises AccessDenied.

        A header counts, if there is one; without it the certificate does, unless a token is asked
        for, too.
        """
        if authorization is None and self.by_certificate and self.peer_tokens is None:
            return PEER
        scheme, _, secret = (authorization or "").partition(" ")
        secret = secret.strip()
        if scheme.lower() == SCHEME and secret:
            if self.peer_tokens is not None and _is_one_of(secret, self.peer_tokens()):
                return PEER
            if self.keys is not None and (caller := self.keys().find(secret)) is not None:
                return caller
        raise AccessDenied(f"authorization: {self._advice()}", is_known=False)

    def _advice(self) -> str:
        if self.peer_tokens is None and not self.by_certificate:
            return "send the gateway's key as `Authorization: Bearer KEY`"
        return "this service asks for the peer token or an operator's key, as `Bearer TOKEN`"

    def check(self, method: str, authorization: str | None) -> Caller | None:
        """Who calls a gRPC method; None for one that is open. Raises AccessDenied."""
        needed = METHOD_ROLES.get(method)
        if needed is Role.OPEN:
            return None
        caller = self.identify(authorization)
        if needed is None:
            raise AccessDenied(f"{method} is in no role", is_known=True)
        require(caller, needed, method)
        return caller


def require(caller: Caller, role: Role, what: str) -> None:
    """Raises AccessDenied unless the caller has the role."""
    if role not in caller.roles:
        raise AccessDenied(f"{what} needs the role {role.value}", is_known=True)


def read_tokens(path: Path) -> tuple[str, ...]:
    """The tokens of a file, one a line: the first is sent, each is accepted.

    Raises OSError, or ValueError for a file without one.
    """
    tokens = tuple(path.read_text(encoding="ascii").split())
    if not tokens or min(map(len, tokens)) < MIN_TOKEN_CHARS:
        raise ValueError(f"{path}: has no token, or one of under {MIN_TOKEN_CHARS} characters")
    return tokens


def watched_tokens(path: Path) -> Watched[tuple[str, ...]]:
    """The tokens of --peer-token-file. Raises BadIdentityFile."""
    return Watched("--peer-token-file", [path], partial(read_tokens, path))


def _is_one_of(given: str, tokens: tuple[str, ...]) -> bool:
    found = [hmac.compare_digest(given.encode("utf-8", "replace"), t.encode()) for t in tokens]
    return any(found)
