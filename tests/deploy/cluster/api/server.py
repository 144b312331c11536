"""A stand-in for an API server: what helm and kubectl ask of one, over HTTP, on 127.0.0.1.

Left out: identities, quotas, conversion between versions, and the owners of fields: an object that
is applied takes the place of the one before, but for its status and the replicas it does not name.
"""

import copy
import json
import re
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.deploy.cluster.api import admission, discovery, protobuf
from tests.deploy.cluster.api.kinds import NAMESPACE, POD, SERVICE, Kind, find
from tests.deploy.cluster.api.store import Object, Store, is_ending, now

_PATH = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+)/(?P<version>[^/]+))"
    r"(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[a-z]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<part>[a-z]+))?"
)
_OWN = re.compile(r"/api/v1/namespaces(?:/(?P<name>[^/]+))?")
_WATCH_S = 60.0
# Deployed objects that end with their pods, when asked to.
_FOREGROUND = b"Foreground"
Log = Callable[[str, str, str], str]


class Refused(Exception):
    """An answer that is an error."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.status = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "code": code,
            "reason": reason,
            "message": message,
        }


@dataclass(frozen=True, slots=True)
class Asked:
    """The subject of a request."""

    kind: Kind
    namespace: str
    name: str
    part: str
    query: dict[str, str]

    @classmethod
    def of(cls, path: str) -> "Asked":
        """Reads a path. Raises Refused."""
        parts = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if match := _OWN.fullmatch(parts.path):
            return cls(NAMESPACE, "", match["name"] or "", "", query)
        match = _PATH.fullmatch(parts.path)
        kind = match and find(
            match["group"] or "", match["core"] or match["version"], match["plural"]
        )
        if not match or not kind:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        return cls(kind, match["namespace"] or "", match["name"] or "", match["part"] or "", query)

    def fits(self, obj: Object) -> bool:
        """True if an object is one of those that a list or watch is about."""
        about = obj["metadata"]
        if self.namespace and about.get("namespace") != self.namespace:
            return False
        labels = about.get("labels", {})
        for term in filter(None, self.query.get("labelSelector", "").split(",")):
            name, _, value = term.replace("==", "=").partition("=")
            if " in " in term or not value:
                continue
            if (labels.get(name.rstrip("!")) == value) == name.endswith("!"):
                return False
        wanted = self.name
        for term in filter(None, self.query.get("fieldSelector", "").split(",")):
            name, _, value = term.partition("=")
            wanted = value if name == "metadata.name" else wanted
        return not wanted or about["name"] == wanted


class Api:
    """The operations, apart from how they travel."""

    def __init__(self, store: Store, log: Log) -> None:
        self.store = store
        self._log = log

    def read(self, asked: Asked) -> Object | str:
        """An object, a list, or a pod's log. Raises Refused."""
        if asked.part == "log":
            return self._log(asked.namespace, asked.name, asked.query.get("container", ""))
        if asked.name:
            return self._one(asked)
        items = [obj for obj in self.store.all_of(asked.kind) if asked.fits(obj)]
        return {
            "kind": f"{asked.kind.name}List",
            "apiVersion": asked.kind.api_version,
            "metadata": {"resourceVersion": str(self.store.version)},
            "items": items,
        }

    def create(self, asked: Asked, obj: Object) -> Object:
        """Raises Refused."""
        about = obj["metadata"]
        about.setdefault("name", about.get("generateName", "") + uuid.uuid4().hex[:5])
        named = Asked(asked.kind, asked.namespace, about["name"], "", asked.query)
        if self._find(named) is not None:
            message = f'{asked.kind.plural} "{named.name}" already exists'
            raise Refused(409, "AlreadyExists", message)
        return self._write(named, obj)

    def replace(self, asked: Asked, obj: Object) -> Object:
        """Raises Refused."""
        self._one(asked)
        return self._write(asked, obj)

    def apply(self, asked: Asked, obj: Object) -> Object:
        """Server-side apply. Raises Refused."""
        old = self._find(asked)
        if old is not None:
            if asked.kind.name in ("Deployment", "StatefulSet"):
                obj["spec"].setdefault("replicas", old["spec"].get("replicas", 1))
            if asked.kind == SERVICE and "clusterIP" in old["spec"]:
                obj["spec"].setdefault("clusterIP", old["spec"]["clusterIP"])
            if "status" in old:
                obj["status"] = old["status"]
        return self._write(asked, obj)

    def merge(self, asked: Asked, patch: Object) -> Object:
        """A merge patch. Raises Refused."""
        return self._write(asked, _merged(self._one(asked), patch))

    def delete(self, asked: Asked, options: bytes) -> Object:
        """A pod ends when its kubelet says so, a workload with its pods if the caller waits.

        Raises Refused.
        """
        obj = self._one(asked)
        waits = asked.kind == POD or (
            asked.kind.name in ("Deployment", "StatefulSet") and _FOREGROUND in options
        )
        if waits:
            self.store.update(asked.kind, obj, _end)
        else:
            self.store.remove(asked.kind, obj)
        details = {"name": asked.name, "uid": obj["metadata"]["uid"]}
        return {"kind": "Status", "apiVersion": "v1", "status": "Success", "details": details}

    def _one(self, asked: Asked) -> Object:
        obj = self._find(asked)
        if obj is None:
            raise Refused(404, "NotFound", f'{asked.kind.plural} "{asked.name}" not found')
        return obj

    def _find(self, asked: Asked) -> Object | None:
        return self.store.get(asked.kind, asked.namespace, asked.name)

    def _write(self, asked: Asked, obj: Object) -> Object:
        kind = asked.kind
        if kind.is_namespaced:
            if self.store.get(NAMESPACE, "", asked.namespace) is None:
                raise Refused(404, "NotFound", f'namespaces "{asked.namespace}" not found')
            obj["metadata"]["namespace"] = asked.namespace
        obj["metadata"].pop("managedFields", None)
        full = {"apiVersion": kind.api_version, "kind": kind.name, **obj}
        if found := admission.problems(kind, full):
            problem = f'{kind.name} "{asked.name}" is invalid: {"; ".join(found)}'
            raise Refused(422, "Invalid", problem)
        return full if asked.query.get("dryRun") == "All" else self.store.put(kind, full)


def _end(obj: Object) -> None:
    if not is_ending(obj):
        obj["metadata"]["deletionTimestamp"] = now()


def _merged(old: Any, patch: Any) -> Any:
    if not isinstance(old, dict) or not isinstance(patch, dict):
        return patch
    new = copy.deepcopy(old)
    for name, value in patch.items():
        if value is None:
            new.pop(name, None)
        else:
            new[name] = _merged(new.get(name), value) if name in new else value
    return new


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    api: Api

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if (found := discovery.document(path)) is not None:
            self._answer(200, found)
        elif path in ("/readyz", "/livez", "/healthz"):
            self._answer(200, "ok")
        else:
            self._reply(lambda asked: self._read(asked))

    def do_POST(self) -> None:
        body = self._body()
        self._reply(lambda asked: (201, self.api.create(asked, _object(body))))

    def do_PUT(self) -> None:
        body = self._body()
        self._reply(lambda asked: (200, self.api.replace(asked, _object(body))))

    def do_PATCH(self) -> None:
        body, how = self._body(), self.headers.get("Content-Type", "")
        change = self.api.apply if "apply" in how else self.api.merge
        self._reply(lambda asked: (200, change(asked, _object(body))))

    def do_DELETE(self) -> None:
        body = self._body()
        self._reply(lambda asked: (200, self.api.delete(asked, body)))

    def _read(self, asked: Asked) -> tuple[int, Object | str] | None:
        if asked.query.get("watch") in ("true", "1"):
            self._watch(asked)
            return None
        return 200, self.api.read(asked)

    def _reply(self, answer: Callable[[Asked], tuple[int, Object | str] | None]) -> None:
        try:
            found = answer(Asked.of(self.path))
        except Refused as refused:
            found = refused.code, refused.status
        if found is not None:
            self._answer(*found)

    def _answer(self, code: int, answer: Object | str) -> None:
        is_text = isinstance(answer, str)
        content = str(answer).encode() if is_text else json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain" if is_text else "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _watch(self, asked: Asked) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            self._send_changes(asked)
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True  # the client has seen enough

    def _send_changes(self, asked: Asked) -> None:
        store = self.api.store
        last = int(asked.query.get("resourceVersion") or 0)
        if asked.query.get("sendInitialEvents") == "true":
            with store.changed:
                last, present = store.version, store.all_of(asked.kind)
            for obj in filter(asked.fits, present):
                self._send("ADDED", obj)
            self._send("BOOKMARK", _bookmark(asked.kind, last))
        end_s = time.monotonic() + min(float(asked.query.get("timeoutSeconds") or _WATCH_S), 60.0)
        while time.monotonic() < end_s:
            for change in store.since(last):
                last = change.version
                if change.key[0] == asked.kind and asked.fits(change.obj):
                    self._send(change.what, change.obj)
            store.wait(last, 1.0)

    def _send(self, what: str, obj: Object) -> None:
        line = json.dumps({"type": what, "object": obj}).encode() + b"\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.flush()


def _bookmark(kind: Kind, version: int) -> Object:
    """The mark after what there is, which a client of a WatchList waits for."""
    annotations = {"k8s.io/initial-events-end": "true"}
    metadata = {"resourceVersion": str(version), "annotations": annotations}
    return {"kind": kind.name, "apiVersion": kind.api_version, "metadata": metadata}


def _object(body: bytes) -> Object:
    if body.startswith(protobuf.MAGIC):
        return protobuf.secret(body)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found: Object = yaml.load(body, loader)
    return found


class ApiServer:
    """Serves a store until it is stopped."""

    def __init__(self, store: Store, log: Log) -> None:
        handler = type("BoundHandler", (Handler,), {"api": Api(store, log)})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def stop(self) -> None:
        """Ends it; watches end with their clients."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
