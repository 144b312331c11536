"""Streams of every kind, over HTTP and through the SDK, each compared with its undisturbed twin."""

import contextlib
import http.client
import json
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pagewire

LIMIT_S = 300.0  # for one stream, whatever happens to it
_POLL_S = 0.002
_LETTERS = "[a-z ]{4000}"  # longer than any output
_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "seeded": {"temperature": 1.0, "top_p": 0.95, "ignore_eos": True},
    "penalized": {
        "temperature": 0.9,
        "presence_penalty": 0.8,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
        "ignore_eos": True,
    },
    "ruled": {"temperature": 1.0, "regex": _LETTERS},
    "n=2": {"temperature": 1.0, "n": 2, "ignore_eos": True},
}


class Verdict(Enum):
    """Judgement of a stream by its twin."""

    SAME = "same"
    CUT = "cut"  # the connection broke; what came is the twin's beginning
    ERROR = "error"  # it ended with an error; what came is the twin's beginning
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class TwinRequest:
    """One request, of some kind."""

    kind: str
    over_http: bool
    prompt: str
    options: dict[str, Any]  # in the words of the SDK, but for regex


@dataclass(slots=True)
class Seen:
    """The part of a stream that a client saw."""

    texts: dict[int, str] = field(default_factory=lambda: defaultdict(str))  # by output
    ends: dict[int, str] = field(default_factory=dict)
    num_pieces: int = 0
    problem: str = ""
    is_cut: bool = False

    def add(self, index: int, text: str, end: str | None) -> None:
        """Adds a piece of an output."""
        self.num_pieces += 1
        self.texts[index] += text
        if end is not None:
            self.ends[index] = end

    def judge(self, twin: "Seen") -> Verdict:
        """Compares it with the same request undisturbed."""
        if not self.problem and (self.texts, self.ends) == (twin.texts, twin.ends):
            return Verdict.SAME
        if not all(twin.texts[index].startswith(text) for index, text in self.texts.items()):
            return Verdict.DIFFERENT
        if not self.problem:
            return Verdict.DIFFERENT
        return Verdict.CUT if self.is_cut else Verdict.ERROR


def asks(count: int, num_tokens: int) -> list[TwinRequest]:
    """So many requests over HTTP, and as many through the SDK, of all kinds in turn."""
    made = []
    for number in range(count):
        kind = list(_KINDS)[number % len(_KINDS)]
        for over_http in (True, False):
            options = _KINDS[kind] | {"max_tokens": num_tokens, "seed": 1000 + number}
            words = " ".join(str(number * 37 + i) for i in range(8 + number % 16))
            made.append(TwinRequest(kind, over_http, f"Count on from {words},", options))
    return made


class Streams:
    """All requests, running at once, each in a thread of its own."""

    def __init__(
        self,
        requests: Sequence[TwinRequest],
        http_port: int,
        grpc_port: int,
        host: str = "127.0.0.1",
    ) -> None:
        self.seen = [Seen() for _ in requests]
        self._http = (host, http_port)
        self._client = pagewire.Client(
            f"{host}:{grpc_port}", timeout_s=LIMIT_S, resume_timeout_s=LIMIT_S
        )
        self._threads = [
            threading.Thread(target=self._follow, args=pair, daemon=True)
            for pair in zip(requests, self.seen, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_running(self) -> int:
        """Streams that have not ended."""
        return sum(thread.is_alive() for thread in self._threads)

    def wait_for_share(self, share: float, twins: Sequence[Seen]) -> None:
        """Waits until the streams have shown this share of all text, by their twins; or ended."""
        wanted = share * _num_characters(twins)
        while self.num_running and _num_characters(self.seen) < wanted:
            time.sleep(_POLL_S)

    def wait_until_all_have_begun(self) -> None:
        """Waits for a first piece of each, or its end."""
        for thread, seen in zip(self._threads, self.seen, strict=True):
            while not seen.num_pieces and thread.is_alive():
                time.sleep(_POLL_S)

    def wait(self) -> list[Seen]:
        """Waits for all ends; returns what was seen."""
        deadline_s = time.monotonic() + LIMIT_S + 10.0
        for thread, seen in zip(self._threads, self.seen, strict=True):
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                seen.problem = f"no end within {LIMIT_S:g} s"
        self._client.close()
        return self.seen

    def _follow(self, ask: TwinRequest, seen: Seen) -> None:
        try:
            if ask.over_http:
                _follow_http(ask, seen, self._http)
            else:
                _follow_sdk(ask, seen, self._client)
        except (OSError, http.client.HTTPException) as error:
            seen.problem, seen.is_cut = f"{type(error).__name__}: {error}", True
        except pagewire.PagewireError as error:
            seen.problem = f"{error.code}: {error}"


def _num_characters(seen: Sequence[Seen]) -> int:
    return sum(len(text) for one in seen for text in list(one.texts.values()))


def _follow_sdk(ask: TwinRequest, seen: Seen, client: pagewire.Client) -> None:
    options = dict(ask.options)
    if regex := options.pop("regex", None):
        options["structured_output"] = pagewire.Regex(regex)
    for delta in client.stream(ask.prompt, **options):
        end = None if delta.finish_reason is None else delta.finish_reason.value
        seen.add(delta.index, delta.text, end)


def _follow_http(ask: TwinRequest, seen: Seen, address: tuple[str, int]) -> None:
    body = {"prompt": ask.prompt, "stream": True, **ask.options}
    if regex := body.pop("regex", None):
        body["structured_outputs"] = {"regex": regex}
    headers = {"content-type": "application/json"}
    opened = http.client.HTTPConnection(*address, timeout=LIMIT_S)
    with contextlib.closing(opened) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        with connection.getresponse() as response:
            _read_events(response, seen)


def _read_events(response: http.client.HTTPResponse, seen: Seen) -> None:
    if response.status != http.HTTPStatus.OK:
        seen.problem = f"HTTP {response.status}: {response.read()[:200]!r}"
        return
    for line in response:
        field, _, data = line.decode().strip().partition(": ")
        if data == "[DONE]":
            return
        if field == "data":  # others are empty, or comments that say that the stream goes on
            _read_event(json.loads(data), seen)
    seen.problem, seen.is_cut = "the stream ended without [DONE]", True


def _read_event(event: dict[str, Any], seen: Seen) -> None:
    if "error" in event:
        seen.problem = str(event["error"]["message"])
        return
    for choice in event["choices"]:
        seen.add(choice["index"], choice["text"], choice["finish_reason"])
