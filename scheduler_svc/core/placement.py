"""Which worker group a sequence should run on, where there are several.

The rule: where the fewest tokens have to be computed before its own are. These are its own tokens
that are not cached there, those that wait there already, and a price for every live request, since
each makes all steps longer. So a long cached prefix draws requests to a group until as much waits
there as the prefix would save; then another group computes it once, and from there on has it, too.
"""

from collections.abc import Sequence as Options
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence

TOKENS_PER_LIVE_REQUEST = 32


@dataclass(frozen=True, slots=True)
class Option:
    """What speaks for and against one group."""

    num_uncached_tokens: int  # of the sequence, if it came here
    num_backlog_tokens: int  # that others still have to compute, waiting or running
    num_live: int  # requests

    @property
    def cost(self) -> tuple[int, int]:
        """In tokens; ties go to the least backlog."""
        load = self.num_backlog_tokens + TOKENS_PER_LIVE_REQUEST * self.num_live
        return self.num_uncached_tokens + load, load


def option_of(scheduler: Scheduler, sequence: Sequence) -> Option:
    """A group's option for a sequence that is not there."""
    table, index = scheduler.residency.table, scheduler.residency.roster.index
    behind = table.num_tokens[index] - table.num_computed[index] - 1  # the newest needs no KV yet
    return Option(
        num_uncached_tokens=len(sequence.token_ids) - scheduler.num_cached_tokens(sequence),
        num_backlog_tokens=scheduler.residency.waiting.num_tokens
        + int(np.maximum(behind, 0).sum()),
        num_live=scheduler.num_running + scheduler.num_waiting,
    )


def ranking(options: Options[Option]) -> list[int]:
    """Indices of the options, the best first; among equals the first named."""
    return sorted(range(len(options)), key=lambda index: options[index].cost)
