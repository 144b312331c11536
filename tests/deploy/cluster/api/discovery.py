"""The first question of a client to an API server: which kinds there are."""

import re
from typing import Any

from tests.deploy.cluster.api.kinds import KINDS, Kind
from tests.deploy.cluster.api.store import kinds_of

VERSION = "1.37"
_VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
_API = re.compile(r"(/openapi/v3)?/(?:api/(v1)|apis/([^/]+)/([^/]+))")
# The options of a PATCH, which say that the server validates.
_OPTIONS = ("dryRun", "fieldManager", "fieldValidation", "force")


def document(path: str) -> dict[str, Any] | None:
    """The document at a path; None if the path is none of discovery's."""
    if path in _FIXED:
        return _FIXED[path]
    if path == "/openapi/v3":
        apis = {kind.path for kind in KINDS}
        return {"paths": {api: {"serverRelativeURL": f"/openapi/v3/{api}"} for api in apis}}
    if path == "/apis":
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": _groups()}
    match = _API.fullmatch(path)
    kinds = kinds_of(match[3] or "", match[2] or match[4]) if match else []
    if not match or not kinds:
        return None
    return _openapi(kinds) if match[1] else _resources(kinds)


_FIXED: dict[str, dict[str, Any]] = {
    "/version": {
        "major": "1",
        "minor": VERSION.split(".")[1],
        "gitVersion": f"v{VERSION}.0",
        "platform": "linux/amd64",
    },
    "/api": {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []},
    "/openapi/v2": {
        "swagger": "2.0",
        "info": {"title": "stand-in", "version": VERSION},
        "paths": {},
        "definitions": {},
    },
}


def _groups() -> list[dict[str, Any]]:
    versions = {kind.group: kind.version for kind in KINDS if kind.group}
    found = []
    for group, version in versions.items():
        named = {"groupVersion": f"{group}/{version}", "version": version}
        found.append({"name": group, "versions": [named], "preferredVersion": named})
    return found


def _resources(kinds: list[Kind]) -> dict[str, Any]:
    resources = [
        {
            "name": kind.plural,
            "singularName": kind.name.lower(),
            "namespaced": kind.is_namespaced,
            "kind": kind.name,
            "shortNames": list(kind.short_names),
            "verbs": _VERBS,
        }
        for kind in kinds
    ]
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": kinds[0].api_version,
        "resources": resources,
    }


def _openapi(kinds: list[Kind]) -> dict[str, Any]:
    options = [{"name": name, "in": "query", "schema": {"type": "string"}} for name in _OPTIONS]
    paths = {}
    for kind in kinds:
        inside = "namespaces/{namespace}/" if kind.is_namespaced else ""
        patch = {
            "operationId": f"patch{kind.name}",
            "parameters": options,
            "responses": {},
            "x-kubernetes-action": "patch",
            "x-kubernetes-group-version-kind": {
                "group": kind.group,
                "version": kind.version,
                "kind": kind.name,
            },
        }
        paths[f"/{kind.path}/{inside}{kind.plural}/{{name}}"] = {"patch": patch}
    return {
        "openapi": "3.0.0",
        "info": {"title": "stand-in", "version": VERSION},
        "paths": paths,
        "components": {"schemas": {}},
    }
