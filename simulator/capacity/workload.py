"""Workloads: requests with arrival times, read from a trace or generated at a rate.

A trace is a file of JSON lines, one request each:

    {"arrival_s": 0.25, "prompt_tokens": 512, "output_tokens": 128}

and optionally `tenant`, `priority`, `timeout_s`, and `prefix` with `prefix_tokens`: requests with
the same prefix name have the same first `prefix_tokens` tokens.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core import SessionHint


class BadTrace(ValueError):
    """Raised when a trace cannot be used; the message names the line and the field."""


class KnownTokens(Protocol):
    """The tokens of a request, where they are not made up, and what else is known of it."""

    @property
    def prompt(self) -> NDArray[np.int32]:
        """The prompt's tokens."""

    @property
    def output(self) -> NDArray[np.int32]:
        """The first tokens of the output, as far as they are known."""

    @property
    def cache_salt(self) -> str:
        """The salt within which cached prefixes are shared."""

    @property
    def skip_prefix_cache(self) -> bool:
        """True if the request neither reads nor fills the prefix cache."""

    @property
    def takes_drafts(self) -> bool:
        """True if tokens may be drafted for it."""

    @property
    def session(self) -> SessionHint | None:
        """The hint of its client about its session."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recording's knowledge of a request beyond its lengths."""

    prompt: NDArray[np.int32]
    output: NDArray[np.int32]  # as far as it was recorded
    cache_salt: str = ""
    skip_prefix_cache: bool = False
    takes_drafts: bool = True
    session: SessionHint | None = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    priority: int = 0
    timeout_s: float | None = None
    prefix: str = ""
    prefix_tokens: int = 0
    recorded: KnownTokens | None = field(default=None, compare=False, repr=False)
    # Places in the workload of requests: it comes when the last of them has ended, and a pause
    # after it, whatever its `arrival_s`.
    follows: tuple[int, ...] = ()
    pause_s: float = 0.0

    def at(self, arrival_s: float) -> "Arrival":
        """The same request at another time."""
        return replace(self, arrival_s=arrival_s)

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise BadTrace(f"{name} is {getattr(self, name)}, must be at least 1")
        if not 0 <= self.arrival_s < math.inf:
            raise BadTrace(f"arrival_s is {self.arrival_s}, must not be negative")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise BadTrace(f"timeout_s is {self.timeout_s}, must be positive")
        if not 0 <= self.prefix_tokens <= self.prompt_tokens:
            raise BadTrace(
                f"prefix_tokens is {self.prefix_tokens}, must be from 0 to prompt_tokens "
                f"({self.prompt_tokens})"
            )
        if bool(self.prefix) != bool(self.prefix_tokens):
            raise BadTrace("prefix and prefix_tokens come together or not at all")


@dataclass(frozen=True, slots=True)
class Range:
    """Integers from low to high, both included, uniformly distributed."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"{self.low}:{self.high} is not a range of 1 and more")


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Poisson arrivals at a mean rate; every choice follows from the seed."""

    rate_per_s: float
    num_requests: int
    prompt_tokens: Range
    output_tokens: Range
    num_prefixes: int = 0  # number of shared prefixes, equally likely; 0: none
    prefix_tokens: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.rate_per_s < math.inf:
            raise ValueError(f"the rate is {self.rate_per_s} requests/s, must be positive")
        if self.num_requests < 1:
            raise ValueError(f"the number of requests is {self.num_requests}, must be at least 1")
        if bool(self.num_prefixes) != bool(self.prefix_tokens):
            raise ValueError("a number of prefixes and their tokens come together or not at all")
        if self.prefix_tokens > self.prompt_tokens.low:
            raise ValueError(
                f"prefixes of {self.prefix_tokens} tokens do not fit into prompts of "
                f"{self.prompt_tokens.low}"
            )

    def arrivals(self) -> list[Arrival]:
        """The requests, in order of arrival."""
        rng = np.random.default_rng(self.seed)
        times_s = np.cumsum(rng.exponential(1 / self.rate_per_s, self.num_requests)).tolist()
        prompts, outputs = (
            rng.integers(r.low, r.high + 1, self.num_requests).tolist()
            for r in (self.prompt_tokens, self.output_tokens)
        )
        prefixes = rng.integers(0, max(self.num_prefixes, 1), self.num_requests).tolist()
        return [
            Arrival(
                at_s,
                prompt,
                output,
                prefix=f"p{prefix}" if self.num_prefixes else "",
                prefix_tokens=self.prefix_tokens,
            )
            for at_s, prompt, output, prefix in zip(
                times_s, prompts, outputs, prefixes, strict=True
            )
        ]


def read_trace(path: Path) -> list[Arrival]:
    """The requests of a file, in order of arrival. Raises BadTrace."""
    arrivals = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            arrivals.append(_arrival(json.loads(line)))
        except (BadTrace, json.JSONDecodeError) as error:
            raise BadTrace(f"{path}, line {number}: {error}") from error
    if not arrivals:
        raise BadTrace(f"{path} holds no request")
    return sorted(arrivals, key=lambda arrival: arrival.arrival_s)


_KINDS: dict[str, type | tuple[type, ...]] = {
    "arrival_s": (int, float),
    "prompt_tokens": int,
    "output_tokens": int,
    "tenant": str,
    "priority": int,
    "timeout_s": (int, float),
    "prefix": str,
    "prefix_tokens": int,
}


def _arrival(fields: object) -> Arrival:
    if not isinstance(fields, dict):
        raise BadTrace("expected an object")
    for name, value in fields.items():
        if name not in _KINDS:
            raise BadTrace(f"unknown field {name!r}; known are {', '.join(_KINDS)}")
        if isinstance(value, bool) or not isinstance(value, _KINDS[name]):
            raise BadTrace(f"{name} is {value!r}")
    missing = [n for n in ("arrival_s", "prompt_tokens", "output_tokens") if n not in fields]
    if missing:
        raise BadTrace(f"no {missing[0]}")
    return Arrival(**fields)


def rate_per_s(arrivals: Sequence[Arrival]) -> float:
    """Mean requests per second until the last arrival."""
    return len(arrivals) / max(arrivals[-1].arrival_s, 1e-9)


def at_rate(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """The same requests with arrival times scaled to another rate."""
    factor = rate_per_s(arrivals) / rate
    return [arrival.at(arrival.arrival_s * factor) for arrival in arrivals]


class Prompts:
    """Token ids for arrivals: equal within shared prefixes, and nowhere else."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(seed)
        self._prefixes: dict[str, NDArray[np.int32]] = {}

    def of(self, arrival: Arrival) -> NDArray[np.int32]:
        """The prompt of one arrival: its own if it has one."""
        if arrival.recorded is not None:
            return arrival.recorded.prompt
        own = self._draw(arrival.prompt_tokens - arrival.prefix_tokens)
        return np.concatenate([self._prefix(arrival), own])

    def _prefix(self, arrival: Arrival) -> NDArray[np.int32]:
        known = self._prefixes.get(arrival.prefix, np.empty(0, dtype=np.int32))
        if len(known) < arrival.prefix_tokens:
            more = self._draw(arrival.prefix_tokens - len(known))
            known = self._prefixes[arrival.prefix] = np.concatenate([known, more])
        return known[: arrival.prefix_tokens]

    def _draw(self, count: int) -> NDArray[np.int32]:
        return self._rng.integers(0, self._vocab_size, count, dtype=np.int32)
