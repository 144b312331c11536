"""The names of the HTTP API, for its log: fields of bodies, headers, routes."""

from collections.abc import Iterator
from functools import cache

from starlette.types import Scope

from gateway.http import fields
from gateway.http.messages import Strict

HEADERS = ("authorization", "content-encoding", "x-tenant", "x-priority", "x-timeout-s", "body")
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


@cache
def field_names() -> frozenset[str]:
    """Every name that a field of a body has, supported or not, and the headers that are read."""
    found = {*HEADERS, *fields.HARMLESS, *fields.CHAT, *fields.COMPLETION, *fields.EMBEDDING}
    for body in _subclasses(Strict):
        for name, field in body.model_fields.items():
            found.add(field.alias or name)
    return frozenset(found)


def place(scope: Scope) -> str:
    """Method and route of a request; what a caller may have written freely is a star."""
    route = getattr(scope.get("route"), "path", "*")
    method = scope.get("method", "")
    return f"{method if method in METHODS else '*'} {route}"


def _subclasses(kind: type[Strict]) -> Iterator[type[Strict]]:
    for sub in kind.__subclasses__():
        yield sub
        yield from _subclasses(sub)
