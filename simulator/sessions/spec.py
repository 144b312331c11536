"""The shape of a workload of agents' sessions, as numbers: turns, growth, pauses, subagents.

Lengths are in tokens and pauses in seconds. What varies is log-normal, by its median and the
standard deviation of its logarithm. The presets draw what public traces report:

    codex    Codex on SWE-bench Pro: 33 turns, 80,000 tokens by turn 30 and up to 180,000, 131
             tokens in for one out, tools of seconds with a long tail, few waits for people
    agentx   vLLM's AgentX traffic: 43 turns, 142,000 tokens in and 444 out a request, subagents in
             44 % of sessions; waits for people of minutes
"""

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np


class BadSpec(ValueError):
    """Raised when a spec cannot be used; the message names the field."""


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A positive quantity: its median, the deviation of its logarithm, and the most it may be."""

    median: float
    sigma: float = 0.0
    most: float = math.inf

    def __post_init__(self) -> None:
        if not (0 < self.median < math.inf and 0 <= self.sigma < math.inf):
            raise BadSpec(f"median {self.median:g} and sigma {self.sigma:g} are no log-normal")
        if self.most < self.median:
            raise BadSpec(f"most is {self.most:g}, below the median, {self.median:g}")

    @property
    def bound(self) -> float:
        """The largest value that is drawn."""
        return self.most if self.sigma else self.median

    def draw(self, rng: np.random.Generator) -> float:
        """One value."""
        drawn = self.median * math.exp(self.sigma * rng.standard_normal())
        return float(min(drawn, self.most))

    def times(self, factor: float) -> "LogNormal":
        """The same quantity, so many times as large."""
        return LogNormal(self.median * factor, self.sigma, self.most * factor)


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """Sessions, of which `concurrency` are alive at a time, and what each consists of."""

    sessions: int
    concurrency: int
    turns: LogNormal
    system_prompts: int  # each session begins with one of so many
    system_tokens: int
    first_tokens: LogNormal  # of the task, after the system prompt
    new_tokens: LogNormal  # that a turn adds: results of tools, or what a person says
    output_tokens: LogNormal
    tool_pause_s: LogNormal
    person_share: float  # of turns, after which a person is waited for
    person_pause_s: LogNormal
    subagent_share: float  # of sessions that have subagents
    subagents: int  # of such a session
    subagent_turns: LogNormal
    max_tokens: int  # of a context; a session that would exceed it is compacted
    compact_tokens: int  # that are left of a compacted context after its system prompt

    def __post_init__(self) -> None:
        least_one = ("sessions", "concurrency", "system_prompts", "system_tokens", "compact_tokens")
        for name in least_one:
            if getattr(self, name) < 1:
                raise BadSpec(f"{name} is {getattr(self, name)}, must be at least 1")
        for name in ("person_share", "subagent_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise BadSpec(f"{name} is {getattr(self, name):g}, must be from 0 to 1")
        if self.subagents < 0:
            raise BadSpec(f"subagents is {self.subagents}, must not be negative")
        turn = self.first_tokens.bound + self.new_tokens.bound + self.output_tokens.bound
        least = self.system_tokens + self.compact_tokens + turn
        if least > self.max_tokens:
            raise BadSpec(
                f"max_tokens is {self.max_tokens}, below the {least:g} that a compacted context "
                "and one turn may take: bound first_tokens, new_tokens and output_tokens by `most`"
            )

    def scaled(self, factor: int) -> "SessionSpec":
        """The same sessions with a fraction of their tokens; turns and pauses stay."""

        def less(count: int) -> int:
            return max(count // factor, 1)

        return replace(
            self,
            system_tokens=less(self.system_tokens),
            first_tokens=self.first_tokens.times(1 / factor),
            new_tokens=self.new_tokens.times(1 / factor),
            output_tokens=self.output_tokens.times(1 / factor),
            max_tokens=less(self.max_tokens) + factor,
            compact_tokens=less(self.compact_tokens),
        )


PRESETS = {
    "codex": SessionSpec(
        sessions=96,
        concurrency=48,
        turns=LogNormal(33, 0.45, 120),
        system_prompts=2,
        system_tokens=8_000,
        first_tokens=LogNormal(2_000, 0.8, 16_000),
        new_tokens=LogNormal(1_200, 1.0, 16_000),
        output_tokens=LogNormal(350, 0.7, 4_000),
        tool_pause_s=LogNormal(1.0, 1.5, 600),
        person_share=0.03,
        person_pause_s=LogNormal(90, 1.0, 1_800),
        subagent_share=0.0,
        subagents=0,
        subagent_turns=LogNormal(1),
        max_tokens=184_000,
        compact_tokens=16_000,
    ),
    "agentx": SessionSpec(
        sessions=96,
        concurrency=48,
        turns=LogNormal(43, 0.5, 160),
        system_prompts=3,
        system_tokens=24_000,
        first_tokens=LogNormal(16_000, 1.0, 64_000),
        new_tokens=LogNormal(2_500, 1.0, 24_000),
        output_tokens=LogNormal(444, 0.7, 4_000),
        tool_pause_s=LogNormal(2.0, 1.5, 600),
        person_share=0.08,
        person_pause_s=LogNormal(90, 1.0, 1_800),
        subagent_share=0.44,
        subagents=3,
        subagent_turns=LogNormal(6, 0.5, 24),
        max_tokens=262_144,
        compact_tokens=24_000,
    ),
}


def read_spec(text: str) -> SessionSpec:
    """The preset of this name, or what a file of this path holds. Raises BadSpec or OSError.

    A file is a JSON object of the fields above; one with "preset" changes that preset's fields.
    """
    if text in PRESETS:
        return PRESETS[text]
    path = Path(text)
    if not path.is_file():
        raise BadSpec(f"{text!r} is no preset ({', '.join(PRESETS)}) and no file")
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return _spec_of(told)
    except (json.JSONDecodeError, BadSpec, TypeError) as error:
        raise BadSpec(f"{path}: {error}") from error


def _spec_of(told: object) -> SessionSpec:
    if not isinstance(told, dict):
        raise BadSpec("expected an object")
    names = [field.name for field in fields(SessionSpec)]
    preset = told.pop("preset", None)
    if preset is not None and preset not in PRESETS:
        raise BadSpec(f"unknown preset {preset!r}; known are {', '.join(PRESETS)}")
    values: dict[str, Any] = {} if preset is None else asdict(PRESETS[preset])
    for name, value in told.items():
        if name not in names:
            raise BadSpec(f"unknown field {name!r}; known are preset, {', '.join(names)}")
        values[name] = value
    if missing := [name for name in names if name not in values]:
        raise BadSpec(f"no {missing[0]}")
    kinds = {field.name: field.type for field in fields(SessionSpec)}
    return SessionSpec(**{name: _value(name, kinds[name], values[name]) for name in names})


def _value(name: str, kind: object, value: Any) -> Any:
    if kind is LogNormal:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return LogNormal(value)
        if not isinstance(value, dict):
            raise BadSpec(f"{name} is {value!r}, neither a number nor an object with a median")
        return LogNormal(**value)
    is_number = isinstance(value, int if kind is int else int | float)
    if not is_number or isinstance(value, bool):
        raise BadSpec(f"{name} is {value!r}")
    return value
