"""Finds the highest request rate that meets an objective by simulating several rates."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from simulator.capacity.measures import CapacityObjective, WorkloadSummary, summarize
from simulator.capacity.virtual_server import VirtualServer
from simulator.capacity.workload import Arrival, at_rate, rate_per_s

PRECISION = 0.01  # relative, of the rate
_MAX_DOUBLINGS = 20


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of simulating one rate."""

    rate_per_s: float
    summary: WorkloadSummary
    excess: str | None  # the latency that was exceeded; None: none was

    @property
    def is_met(self) -> bool:
        """True if the objective was met."""
        return self.excess is None


def trials(
    make_server: Callable[[], VirtualServer],
    arrivals: Sequence[Arrival],
    objective: CapacityObjective,
) -> Iterator[Trial]:
    """Doubles or halves the workload's own rate until the result changes, then bisects."""

    def tried(rate: float) -> Trial:
        summary = summarize(make_server().serve(at_rate(arrivals, rate)))
        return Trial(rate, summary, objective.excess(summary))

    trial = tried(rate_per_s(arrivals))
    yield trial
    low = high = trial.rate_per_s
    factor = 2.0 if trial.is_met else 0.5
    for _ in range(_MAX_DOUBLINGS):
        last, was_met = trial.rate_per_s, trial.is_met
        trial = tried(last * factor)
        yield trial
        if trial.is_met != was_met:
            low, high = sorted((last, trial.rate_per_s))
            break
    while high > low * (1 + PRECISION):
        trial = tried((low + high) / 2)
        yield trial
        low, high = (trial.rate_per_s, high) if trial.is_met else (low, trial.rate_per_s)


def highest(tried: Sequence[Trial]) -> Trial | None:
    """The trial with the highest rate that met the objective; None when none did."""
    return max((t for t in tried if t.is_met), key=lambda trial: trial.rate_per_s, default=None)


def is_bounded(tried: Sequence[Trial]) -> bool:
    """True if some rate missed the objective; if not, the workload is too small for a limit."""
    return any(not trial.is_met for trial in tried)
