"""Streams completions from any server with OpenAI's API, using the standard library only.

One HTTP/1.1 connection per request. It is a benchmark's client: it records when tokens arrive and
how many; it drops their text.
"""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from pagewire._types import Prompt, Usage
from pagewire.cli.benchmark.load import RequestFailed, StreamArrival

DONE = "[DONE]"
MAX_LINE_BYTES = 2**24


@dataclass(frozen=True, slots=True)
class OpenAIServer:
    """The address of the server. `url` is its root, the part before /v1."""

    url: str
    api_key: str | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--url: {self.url!r} is not like http://HOST:PORT")

    async def models(self) -> list[dict[str, Any]]:
        """The served models. Raises RequestFailed."""
        async with self._answer("GET", "/v1/models", b"") as body:
            listed = json.loads(b"".join([part async for part in body]))
        return list(listed["data"])

    async def stream(
        self, prompt: Prompt, num_tokens: int, model: str
    ) -> AsyncIterator[StreamArrival]:
        """Streams a greedy completion of exactly `num_tokens` tokens. Raises RequestFailed.

        Events do not report their number of tokens: each counts as one, and the usage at the end is
        the server's own.
        """
        request = {
            "model": model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        payload = json.dumps(request).encode()
        async with (
            self._answer("POST", "/v1/completions", payload) as body,
            contextlib.aclosing(_events(body)) as events,
        ):
            async for event in events:
                if "error" in event:
                    raise RequestFailed(str(event["error"]))
                yield StreamArrival(1 if event.get("choices") else 0, _usage(event))

    @contextlib.asynccontextmanager
    async def _answer(
        self, method: str, path: str, payload: bytes
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The body of a successful answer, in parts. Raises RequestFailed for every error."""
        parts = urlsplit(self.url)
        try:
            reader, writer = await asyncio.open_connection(
                parts.hostname, parts.port, ssl=_tls(parts), limit=MAX_LINE_BYTES
            )
        except OSError as error:
            raise RequestFailed(f"{self.url}: {error}") from error
        try:
            writer.write(self._head(method, parts, path, len(payload)) + payload)
            await writer.drain()
            status, is_chunked = await _read_head(reader)
            body = _chunks(reader) if is_chunked else _rest(reader)
            if status != 200:
                said = b"".join([part async for part in body]).decode(errors="replace")
                raise RequestFailed(f"{method} {path}: status {status}: {said[:300]}")
            yield body
        except (OSError, EOFError, ValueError) as error:
            raise RequestFailed(f"{method} {path}: {type(error).__name__}: {error}") from error
        finally:
            writer.close()

    def _head(self, method: str, parts: SplitResult, path: str, num_bytes: int) -> bytes:
        lines = [
            f"{method} {parts.path.rstrip('/')}{path} HTTP/1.1",
            f"Host: {parts.netloc}",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {num_bytes}",
        ]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "", ""]).encode()


def _tls(parts: SplitResult) -> ssl.SSLContext | None:
    return ssl.create_default_context() if parts.scheme == "https" else None


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """(status, whether the body is chunked)."""
    version, _, rest = (await reader.readline()).partition(b" ")
    if not version.startswith(b"HTTP/1."):
        raise ValueError(f"{version[:20]!r} is no answer of HTTP/1")
    status, is_chunked = int(rest[:3]), False
    while (line := await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        if name.strip().lower() == "transfer-encoding":
            is_chunked = value.strip().lower() == "chunked"
    return status, is_chunked


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readline()).split(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readline()


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while part := await reader.read(2**16):
        yield part


async def _events(body: AsyncIterator[bytes]) -> AsyncGenerator[dict[str, Any], None]:
    """The objects of an event stream until its end. Raises RequestFailed if the end is missing."""
    buffered = b""
    async for part in body:
        *lines, buffered = (buffered + part).split(b"\n")
        for data in _data_of(lines):
            if data == DONE:
                return
            yield json.loads(data)
    raise RequestFailed("the stream broke off")


def _data_of(lines: Sequence[bytes]) -> list[str]:
    fields = (line.decode().partition(":") for line in lines)
    return [value.strip() for name, _, value in fields if name == "data"]


def _usage(event: dict[str, Any]) -> Usage | None:
    told = event.get("usage")
    if not told:
        return None
    return Usage(prompt_tokens=told["prompt_tokens"], completion_tokens=told["completion_tokens"])
