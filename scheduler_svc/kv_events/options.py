"""The option --kv-events-config: JSON with the keys that vLLM uses."""

import argparse
import importlib.util
import json
import re
from dataclasses import dataclass, fields
from typing import Any

from wire.identity.options import MAX_PORT

_ENDPOINT = re.compile(r"tcp://(\*|[^:/?#\s]+|\[[0-9a-fA-F:.]+\]):([0-9]{1,5})")
_MODULES = ("zmq", "msgpack")
_INSTALL = "pip install 'pagewire[kv-events]'"


@dataclass(frozen=True, slots=True)
class KvEventOptions:
    """Settings of what is published, where and how. Raises ValueError, naming the key."""

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"  # or null: none
    endpoint: str = "tcp://*:5557"  # of the first worker group; each further one has the next port
    replay_endpoint: str | None = None  # where batches are sent again; None: nowhere
    buffer_steps: int = 10_000  # batches that can be sent again
    hwm: int = 100_000  # messages that wait for one subscriber
    max_queue_size: int = 100_000  # batches that wait for the publisher
    topic: str = ""
    event_format: str = "map"  # or array: as vLLM before 0.24

    def __post_init__(self) -> None:
        _require(self.publisher in ("zmq", "null"), "publisher", "is zmq or null")
        _require(self.event_format in ("map", "array"), "event_format", "is map or array")
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            _require(getattr(self, name) > 0, name, "must be above 0")
        for name in ("endpoint", "replay_endpoint"):
            text = getattr(self, name)
            problem = "is tcp://HOST:PORT, or tcp://*:PORT for all addresses"
            _require(text is None or _is_endpoint(text), name, problem)
        if self.is_on and not all(map(importlib.util.find_spec, _MODULES)):
            raise ValueError(f"kv_events_config: it needs pyzmq and msgpack: {_INSTALL}")

    @property
    def is_on(self) -> bool:
        """True if events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"

    def endpoint_of(self, rank: int) -> str:
        """The address at which the events of a worker group are published."""
        return _with_port_of(self.endpoint, rank)

    def replay_endpoint_of(self, rank: int) -> str | None:
        """The address at which the batches of a worker group are sent again; None: nowhere."""
        return None if self.replay_endpoint is None else _with_port_of(self.replay_endpoint, rank)


def take_kv_events(options: dict[str, Any]) -> KvEventOptions | None:
    """Reads the option from all options; None: nothing is published. Raises ValueError."""
    if (text := options.pop("kv_events_config")) is None:
        return None
    found = parse(text)
    return found if found.is_on else None


_KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    str: ((str,), "text"),
    str | None: ((str, type(None)), "text or null"),
}


def add_kv_events_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option to a parser."""
    parser.add_argument(
        "--kv-events-config",
        metavar="JSON",
        help="publish which blocks the prefix caches hold, over ZMQ, for routers: an object such "
        'as {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}: docs/kv-events.md',
    )


def parse(text: str) -> KvEventOptions:
    """Reads the option. Raises ValueError, naming the key."""
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"kv_events_config: is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise ValueError("kv_events_config: must be a JSON object")
    known = {field.name: field.type for field in fields(KvEventOptions)}
    for key, value in given.items():
        if key not in known:
            raise ValueError(f"kv_events_config: {key} is not known: {', '.join(known)}")
        types, wanted = _KINDS[known[key]]
        is_it = isinstance(value, types) and (bool in types or not isinstance(value, bool))
        _require(is_it, key, f"must be {wanted}")
    return KvEventOptions(**given)


def _require(is_so: bool, key: str, problem: str) -> None:
    if not is_so:
        raise ValueError(f"kv_events_config: {key} {problem}")


def _is_endpoint(text: str) -> bool:
    found = _ENDPOINT.fullmatch(text)
    return found is not None and 0 < int(found[2]) <= MAX_PORT


def _with_port_of(endpoint: str, rank: int) -> str:
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"
