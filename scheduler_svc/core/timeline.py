"""Where a request's time went. Times come in as arguments; the parts always add up to the age."""

from enum import Enum


class Phase(Enum):
    """What a request is doing, or what it waits for."""

    QUEUE = "queue"  # has never run
    PREFILL = "prefill"  # runs; its next token is not sampled yet
    DECODE = "decode"  # runs, token by token
    PREEMPTED = "preempted"  # has run and waits to go on
    WORKER_AWAY = "worker away"  # there is no worker


class Timeline:
    """Seconds spent in each phase, up to a moment that whoever asks names."""

    __slots__ = ("_arrival_s", "_since_s", "_spent_s", "phase")

    def __init__(self, arrival_s: float) -> None:
        self.phase = Phase.QUEUE
        self._arrival_s = self._since_s = arrival_s
        self._spent_s = dict.fromkeys(Phase, 0.0)

    def enter(self, phase: Phase, now_s: float) -> None:
        """Another phase begins."""
        now_s = max(now_s, self._since_s)
        self._spent_s[self.phase] += now_s - self._since_s
        self.phase, self._since_s = phase, now_s

    def spent_s(self, now_s: float) -> dict[Phase, float]:
        """Seconds in each phase until now."""
        spent_s = dict(self._spent_s)
        spent_s[self.phase] += max(now_s - self._since_s, 0.0)
        return spent_s

    def age_s(self, now_s: float) -> float:
        """Seconds since the arrival."""
        return max(now_s, self._since_s) - self._arrival_s

    def tell(self, now_s: float) -> str:
        """The phases that took time, in words."""
        parts = [f"{s:.3f} s {phase.value}" for phase, s in self.spent_s(now_s).items() if s > 0]
        return ", ".join(parts) or "no time at all"
