"""A stand-in for the model hub: what huggingface_hub asks over HTTP, answered from memory."""

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

API = re.compile(
    r"/api/models/(?P<repository>[^/]+/[^/]+?)(?:/(?P<what>revision|tree)/(?P<revision>.+?))?/?"
)
FILE = re.compile(r"/(?P<repository>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")


def commit_of(revision: str) -> str:
    return hashlib.sha1(revision.encode()).hexdigest()


@dataclass
class Repository:
    """Files by branch; large ones are stored apart, as weights are."""

    branches: dict[str, dict[str, bytes]]
    token: str = ""  # who has it may read; empty: all
    status: int = 401  # of those who may not
    has_xet: bool = False  # large files are also offered in chunks
    stored_apart: tuple[str, ...] = (".safetensors",)

    def files_at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """The commit and the files of a branch or commit."""
        for branch, files in self.branches.items():
            if revision in (branch, commit_of(branch)):
                return commit_of(branch), files
        return None


@dataclass
class Hub:
    """Repositories, what was asked of them, and faults to come."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, range
    cuts: dict[str, list[int]] = field(default_factory=dict)  # by file: bytes before each cut
    stalls: dict[str, int] = field(default_factory=dict)  # by file: bytes before silence
    broken: int = 0  # the status of all answers, if not 0

    def gets(self, file: str) -> list[str]:
        """The ranges in which a file was asked for, empty for the whole."""
        return [
            part for method, path, part in self.asked if method == "GET" and path.endswith(file)
        ]

    @property
    def files(self) -> set[str]:
        """Names of the files that were sent."""
        return {path.rpartition("/")[2] for method, path, _ in self.asked if "/resolve/" in path}


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub on a port of its own."""
    hub = Hub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    headers: Message

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def log_message(self, *_: object) -> None:
        pass

    def _serve(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path, self.headers.get("range", "")))
        if self.hub.broken:
            return self._answer(self.hub.broken, {"error": "broken"})
        asked = API.fullmatch(path) or FILE.fullmatch(path)
        repository = self.hub.repositories.get(asked["repository"]) if asked else None
        if asked is None or repository is None:
            return self._refuse(401, "RepoNotFound", "Invalid username or password.")
        found = repository.files_at(asked["revision"] or "main")
        if found is None:
            return self._refuse(404, "RevisionNotFound", "Invalid rev id")
        commit, files = found
        if asked.re is API:
            return self._describe(repository, asked["what"], commit, files)
        if repository.token and self.headers.get("authorization") != f"Bearer {repository.token}":
            return self._refuse(
                repository.status, "GatedRepo", "Access to this model is restricted"
            )
        if asked["path"] not in files:
            return self._refuse(404, "EntryNotFound", "Entry not found")
        return self._send_file(asked["path"], files[asked["path"]], commit)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._answer(status, {"error": message}, {"X-Error-Code": code, "X-Error-Message": message})

    def _answer(self, status: int, body: object, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        sizes = {"Content-Length": str(len(content)), "Content-Type": "application/json"}
        for name, value in {**sizes, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def _describe(
        self, repository: Repository, what: str | None, commit: str, files: dict[str, bytes]
    ) -> None:
        if what != "tree":
            siblings = [{"rfilename": name} for name in files]
            return self._answer(200, {"id": "x/y", "sha": commit, "siblings": siblings})
        return self._answer(200, [_entry(repository, *item) for item in files.items()])

    def _send_file(self, name: str, content: bytes, commit: str) -> None:
        start = int(self.headers.get("range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        cuts = self.hub.cuts.get(name)
        if cuts:
            self.wfile.write(content[start : start + cuts.pop(0)])
            self.wfile.flush()
            self.close_connection = True
            return
        if name in self.hub.stalls:
            self.wfile.write(content[start : start + self.hub.stalls[name]])
            self.wfile.flush()
            while name in self.hub.stalls:
                time.sleep(0.01)
            self.close_connection = True
            return
        self.wfile.write(content[start:])


def _entry(repository: Repository, name: str, content: bytes) -> dict[str, object]:
    oid = hashlib.sha1(content).hexdigest()
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(content), "oid": oid}
    if name.endswith(repository.stored_apart):
        digest = hashlib.sha256(content).hexdigest()
        if repository.has_xet:
            entry["xetHash"] = digest
        entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 134}
    return entry
