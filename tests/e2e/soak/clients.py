"""Asks for a wish over HTTP (whole or streamed) or over the SDK (streamed), and may walk away."""

import http.client
import json
import random
from dataclasses import dataclass
from typing import Any

import pagewire
from tests.e2e.soak.wishes import Wish
from tests.pace import patience

TIMEOUT_S = patience(75)
WAYS = ("http", "sse", "sdk")
_SAMPLING = (
    *("max_tokens", "temperature", "seed", "top_p", "top_k", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


@dataclass(frozen=True, slots=True)
class SoakAnswer:
    """The texts of all choices; whole unless the client walked away."""

    texts: tuple[str, ...]
    is_whole: bool


class AnswerCut(Exception):
    """Raised when an answer ended before its end, or was refused; `began` tells whether it came."""

    def __init__(self, message: str, *, began: bool = False) -> None:
        super().__init__(message)
        self.began = began


@dataclass(frozen=True, slots=True)
class Customer:
    """Asks a gateway."""

    http_port: int
    grpc_port: int

    def ask(self, wish: Wish, way: str, rng: random.Random, cancels: float = 0.0) -> SoakAnswer:
        """The answer; with probability `cancels` only its beginning. Raises AnswerCut."""
        most = rng.randrange(1, 12) if rng.random() < cancels else None
        if way == "sdk":
            return self._sdk(wish, most)
        try:
            return self._http(wish, way == "sse", most)
        except (OSError, http.client.HTTPException) as error:
            raise AnswerCut(f"{type(error).__name__}: {error}") from error

    def _http(self, wish: Wish, streams: bool, most: int | None) -> SoakAnswer:
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=TIMEOUT_S)
        try:
            body = json.dumps(wish.body | ({"stream": True} if streams else {}))
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", body, headers)
            if most is not None and not streams:
                return SoakAnswer(("",) * wish.num_outputs, is_whole=False)  # leaves at once
            response = connection.getresponse()
            if response.status != 200:
                raise AnswerCut(f"{response.status}: {response.read()[:300]!r}")
            if not streams:
                choices = json.loads(response.read())["choices"]
                return SoakAnswer(tuple(choice["text"] for choice in choices), is_whole=True)
            return _read_events(response, wish.num_outputs, most)
        finally:
            connection.close()

    def _sdk(self, wish: Wish, most: int | None) -> SoakAnswer:
        options: dict[str, Any] = {key: wish.body[key] for key in _SAMPLING if key in wish.body}
        if "guided_regex" in wish.body:
            options["structured_output"] = pagewire.Regex(wish.body["guided_regex"])
        if "guided_json" in wish.body:
            options["structured_output"] = pagewire.JsonSchema(wish.body["guided_json"])
        if "stop" in wish.body:
            options["stop"] = wish.body["stop"]
        target = f"127.0.0.1:{self.grpc_port}"
        with pagewire.Client(target, timeout_s=TIMEOUT_S, resume_timeout_s=TIMEOUT_S) as client:
            return _read_stream(client.stream(wish.body["prompt"], **options), most)


def _read_stream(stream: Any, most: int | None) -> SoakAnswer:
    parts: list[str] = []
    try:
        for delta in stream:
            parts.append(delta.text)
            if len(parts) == most:
                stream.close()
                return SoakAnswer(("".join(parts),), is_whole=False)
    except pagewire.PagewireError as error:
        raise AnswerCut(f"{type(error).__name__}: {error}", began=bool(parts)) from error
    return SoakAnswer(("".join(parts),), is_whole=True)


def _read_events(
    response: http.client.HTTPResponse, num_outputs: int, most: int | None
) -> SoakAnswer:
    texts = [""] * num_outputs
    num_events = 0
    for line in response:
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            return SoakAnswer(tuple(texts), is_whole=True)
        event = json.loads(line[6:])
        if "error" in event:
            raise AnswerCut(f"error event: {event['error']['message'][:300]}")
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
        num_events += 1
        if num_events == most:
            return SoakAnswer(tuple(texts), is_whole=False)
    raise AnswerCut("the stream ended without [DONE]")
