"""Time that a request spent in each phase. Times are arguments; the phases add up to its age."""

from dataclasses import dataclass
from enum import Enum

_KEPT_SPANS = 64


class Phase(Enum):
    """The phase of a request: how it runs, or why it waits."""

    QUEUE = "queue"  # has never run
    PREPARING = "preparing"  # waits until the worker has prepared what it requires
    KV = "kv"  # waits until blocks of its prompt have come from a tier
    PREFILL = "prefill"  # runs; no token sampled since admission
    DECODE = "decode"  # runs, token by token
    PREEMPTED = "preempted"  # has run and waits to continue
    WORKER_AWAY = "worker away"  # there is no worker


@dataclass(frozen=True, slots=True)
class Span:
    """One stay in a phase, in seconds of the shell's clock."""

    phase: Phase
    begin_s: float
    end_s: float


class Timeline:
    """Seconds spent in each phase, up to a time given by the caller."""

    __slots__ = ("_arrival_s", "_past", "_since_s", "_spent_s", "phase")

    def __init__(self, arrival_s: float) -> None:
        self.phase = Phase.QUEUE
        self._arrival_s = self._since_s = arrival_s
        self._spent_s = dict.fromkeys(Phase, 0.0)
        self._past: list[Span] = []  # the last spans that ended

    def enter(self, phase: Phase, now_s: float) -> None:
        """Starts another phase at `now_s`."""
        now_s = max(now_s, self._since_s)
        if now_s > self._since_s:
            self._spent_s[self.phase] += now_s - self._since_s
            self._past.append(Span(self.phase, self._since_s, now_s))
            del self._past[:-_KEPT_SPANS]
        self.phase, self._since_s = phase, now_s

    def spent_s(self, now_s: float) -> dict[Phase, float]:
        """Seconds in each phase until now."""
        spent_s = dict(self._spent_s)
        spent_s[self.phase] += max(now_s - self._since_s, 0.0)
        return spent_s

    def spans(self, now_s: float) -> list[Span]:
        """Its spans, oldest first; only the last ones if there were many."""
        return [*self._past, Span(self.phase, self._since_s, max(now_s, self._since_s))]

    def age_s(self, now_s: float) -> float:
        """Seconds since the arrival."""
        return max(now_s, self._since_s) - self._arrival_s

    def tell(self, now_s: float) -> str:
        """The phases that took time, as text with seconds."""
        parts = [f"{s:.3f} s {phase.value}" for phase, s in self.spent_s(now_s).items() if s > 0]
        return ", ".join(parts) or "no time at all"
