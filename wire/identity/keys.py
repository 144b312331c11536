"""API keys in a file: one line each, with the key's hash and not the key.

    # name   tenant   roles           SHA-256 of the key
    alice    acme     user            sha256:6fd2...
    ops      infra    user,operator   sha256:0b91...

A key has 256 random bits, so a fast hash protects it: nothing can be guessed, and a slow hash would
cost a core at a few hundred requests per second. Keys that people invent do not get into the file,
since `pagewire keys new` is what writes its lines.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from wire.identity.roles import KEY_ROLES, Role

PREFIX = "pw"
SECRET_BYTES = 32
MAX_FILE_BYTES = 4 << 20
_NAME = re.compile(r"[A-Za-z0-9.-]{1,64}")
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_NO_HASH = bytes(32)
_SINGLE = ""  # the name of a key that was given as an option


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls. Without a tenant it may name one itself."""

    name: str
    tenant: str | None
    roles: frozenset[Role]


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """A line of the file."""

    caller: Caller
    sha256: bytes

    def line(self) -> str:
        """The line as it stands in the file."""
        caller = self.caller
        roles = ",".join(role.value for role in KEY_ROLES if role in caller.roles)
        return f"{caller.name} {caller.tenant} {roles} sha256:{self.sha256.hex()}"


class KeyRing:
    """The keys of a file, or a single one."""

    def __init__(self, entries: Iterable[KeyEntry]) -> None:
        self._by_name = {entry.caller.name: entry for entry in entries}

    @classmethod
    def of_single(cls, key: str) -> "KeyRing":
        """One key for everything; its holders are one tenant or name their own."""
        caller = Caller(_SINGLE, None, frozenset(KEY_ROLES))
        return cls([KeyEntry(caller, _sha256(key))])

    def find(self, key: str) -> Caller | None:
        """Whose key it is; None for an unknown one.

        The name in the key is no secret and finds the line; the hashes are compared in constant
        time, also for a name that is not there.
        """
        entry = self._by_name.get(_name_in(key)) or self._by_name.get(_SINGLE)
        is_right = hmac.compare_digest(_sha256(key), entry.sha256 if entry else _NO_HASH)
        return entry.caller if entry is not None and is_right else None


def new_key(name: str, tenant: str, roles: Iterable[Role]) -> tuple[str, KeyEntry]:
    """A random key and its line. Raises ValueError for a name that cannot be in the file."""
    key = f"{PREFIX}_{_named('name', name)}_{secrets.token_urlsafe(SECRET_BYTES)}"
    caller = Caller(name, _named("tenant", tenant), frozenset(roles))
    if not caller.roles:
        raise ValueError("role: give user, operator or both")
    return key, KeyEntry(caller, _sha256(key))


def read_keys(path: Path) -> KeyRing:
    """The keys of a file. Raises OSError, or ValueError naming the line."""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path}: is longer than {MAX_FILE_BYTES} bytes")
    entries: dict[str, KeyEntry] = {}
    for number, text in enumerate(path.read_text(encoding="ascii").splitlines(), 1):
        words = text.partition("#")[0].split()
        if not words:
            continue
        try:
            entry = _entry(words)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if entry.caller.name in entries:
            raise ValueError(f"{path}, line {number}: {entry.caller.name!r} is there twice")
        entries[entry.caller.name] = entry
    return KeyRing(entries.values())


def _entry(words: list[str]) -> KeyEntry:
    if len(words) != 4:
        raise ValueError(f"has {len(words)} words, not NAME TENANT ROLES sha256:HASH")
    name, tenant, roles, hashed = words
    if not _HASH.fullmatch(hashed):
        raise ValueError("the last word is not sha256: and 64 hexadecimal digits")
    caller = Caller(
        _named("name", name),
        _named("tenant", tenant),
        frozenset(map(_role, roles.split(","))),
    )
    return KeyEntry(caller, bytes.fromhex(hashed.removeprefix("sha256:")))


def _named(what: str, text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError(f"{what}: {text!r} is not 1 to 64 letters, digits, dots and hyphens")
    return text


def _role(word: str) -> Role:
    for role in KEY_ROLES:
        if role.value == word:
            return role
    raise ValueError(f"{word!r} is no role; roles are user and operator")


def _name_in(key: str) -> str:
    prefix, _, rest = key.partition("_")
    return rest.partition("_")[0] if prefix == PREFIX else _SINGLE


def _sha256(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
