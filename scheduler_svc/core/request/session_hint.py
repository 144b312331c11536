"""The words of a client about the session of a request: hints, never duties."""

from dataclasses import dataclass

MAX_SESSION_ID_BYTES = 64
SessionKey = tuple[str, str]  # (salt, id): a name counts within a salt, as cached prefixes do


@dataclass(frozen=True, slots=True)
class SessionHint:
    """A session as its client names it, and when it comes back."""

    session_id: str = ""  # of requests that go on with one another; empty: not told
    parent_id: str = ""  # the session that awaits this one; empty: none
    # Seconds within which its next request is expected; 0: this is its last one. None: not told.
    ttl_s: float | None = None
    prefix_key: str = ""  # requests of one key begin alike; empty: not told

    @property
    def placed_by(self) -> str:
        """The name that it has in common with requests that begin alike; empty: none."""
        return self.prefix_key or self.parent_id or self.session_id

    @property
    def problem(self) -> str | None:
        """Why it cannot be taken; None when it can."""
        for name in ("session_id", "parent_id", "prefix_key"):
            if len(getattr(self, name).encode()) > MAX_SESSION_ID_BYTES:
                return f"session: {name} is longer than {MAX_SESSION_ID_BYTES} bytes"
        if self.ttl_s is not None and not self.ttl_s >= 0:
            return f"session: ttl_s is {self.ttl_s}, must not be negative"
        return None


@dataclass(frozen=True, slots=True)
class ToldSession:
    """The hint of a request, and whose it is."""

    tenant: str = ""
    key: SessionKey | None = None
    parent: SessionKey | None = None
    ttl_s: float | None = None

    @classmethod
    def of(cls, hint: SessionHint | None, tenant: str, salt: str) -> "ToldSession":
        """A hint of a tenant's request with this salt; NOTHING_TOLD where there is none."""
        if hint is None:
            return NOTHING_TOLD
        key = (salt, hint.session_id) if hint.session_id else None
        parent = (salt, hint.parent_id) if hint.parent_id else None
        return cls(tenant, key, parent, hint.ttl_s)

    @property
    def has_ended(self) -> bool:
        """True if nothing follows."""
        return self.ttl_s is not None and self.ttl_s <= 0


NOTHING_TOLD = ToldSession()
