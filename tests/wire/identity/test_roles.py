"""Every method of every service has a role, and an interceptor that holds callers to it."""

import importlib
import pkgutil
import re
from pathlib import Path

import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

import pagewire.v1
from wire.identity.access import PEER, Access, AccessDenied
from wire.identity.keys import KeyRing, new_key
from wire.identity.roles import METHOD_ROLES, Role

REFLECTION_V1 = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"  # has no descriptor


def all_methods() -> set[str]:
    """Every method of all contracts, and of what the servers add."""
    names = [found.name for found in pkgutil.iter_modules(pagewire.v1.__path__)]
    files = [
        importlib.import_module(f"pagewire.v1.{name}").DESCRIPTOR
        for name in names
        if name.endswith("_pb2")
    ]
    files += [health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR]
    return {
        f"/{service.full_name}/{method.name}"
        for file in files
        for service in file.services_by_name.values()
        for method in service.methods
    } | {REFLECTION_V1}


def test_every_method_has_a_role_and_every_role_a_method() -> None:
    assert set(METHOD_ROLES) == all_methods()


def test_the_document_has_the_same_table() -> None:
    text = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    told = {
        (service, method, role)
        for service, methods, role in re.findall(r"^\| (\w+) \| ([\w, ]+) \| (\w+) \|$", text, re.M)
        if service.endswith(("Service", "Health", "ServerReflection"))
        for method in methods.split(", ")
    }
    names = {method: method.split("/") for method in METHOD_ROLES}
    held = {
        (path[1].rpartition(".")[2], path[2], METHOD_ROLES[method].value)
        for method, path in names.items()
    }
    assert told == held


def test_only_probes_and_reflection_are_open() -> None:
    opened = {method for method, role in METHOD_ROLES.items() if role is Role.OPEN}
    assert all(method.startswith(("/grpc.health.", "/grpc.reflection.")) for method in opened)


def test_what_changes_or_shows_a_service_is_not_for_users() -> None:
    pool = descriptor_pool.Default()
    for service in ("SchedulerService", "WorkerService", "DebugService"):
        for method in pool.FindServiceByName(f"pagewire.v1.{service}").methods:
            assert METHOD_ROLES[f"/pagewire.v1.{service}/{method.name}"] in (
                Role.OPERATOR,
                Role.PEER,
            )


def test_a_method_without_a_role_is_refused_to_all() -> None:
    access = Access(peer_tokens=lambda: ("t" * 16,))
    with pytest.raises(AccessDenied) as denied:
        access.check("/pagewire.v1.DebugService/New", f"Bearer {'t' * 16}")
    assert denied.value.is_known


def test_who_may_do_what() -> None:
    user, users_line = new_key("u", "t", [Role.USER])
    operator, operators_line = new_key("o", "t", [Role.OPERATOR])
    ring = KeyRing([users_line, operators_line])
    token = "t" * 16
    access = Access(keys=lambda: ring, peer_tokens=lambda: ("other" * 4, token))

    def outcome(method: str, secret: str | None) -> str:
        try:
            caller = access.check(method, None if secret is None else f"bearer {secret}")
        except AccessDenied as denied:
            return "denied" if denied.is_known else "unknown"
        return "open" if caller is None else caller.name

    for method, role in METHOD_ROLES.items():
        found = [outcome(method, secret) for secret in (None, "wrong", user, operator, token)]
        match role:
            case Role.OPEN:
                assert found == ["open"] * 5
            case Role.USER:
                assert found == ["unknown", "unknown", "u", "denied", PEER.name]
            case Role.OPERATOR:
                assert found == ["unknown", "unknown", "denied", "o", PEER.name]
            case Role.PEER:
                assert found == ["unknown", "unknown", "denied", "denied", PEER.name]


def test_a_certificate_is_enough_alone_and_not_where_a_token_is_asked_for_too() -> None:
    method = "/pagewire.v1.WorkerService/Attach"
    assert Access(by_certificate=True).check(method, None) is PEER
    both = Access(peer_tokens=lambda: ("t" * 16,), by_certificate=True)
    with pytest.raises(AccessDenied):
        both.check(method, None)
    with pytest.raises(AccessDenied):  # what is shown counts
        Access(by_certificate=True).check(method, "Bearer wrong")
