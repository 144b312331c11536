"""Selects the worker group for a sequence, where there are several.

The rule: the group with the fewest tokens to compute before the sequence's first output. These are
its own tokens that are not cached there, the backlog of that group, and a fixed number of tokens
per live request, since each makes all steps longer. A group whose worker would have to read the
sequence's adapter costs as many tokens as may be computed meanwhile. So a long cached prefix
attracts requests to a group until its backlog equals the saving; then another group computes the
prefix once and has it cached, too.

A client that says which requests begin alike breaks ties: what is being computed cannot be found
yet. Among groups that cost about the same, the one drawn for its key comes first.
"""

from collections.abc import Sequence as Options
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from scheduler_svc.core.request.sequence import Sequence
from scheduler_svc.core.scheduler import Scheduler

TOKENS_PER_LIVE_REQUEST = 32
TOKENS_PER_ADAPTER = 256  # to be read first


@dataclass(frozen=True, slots=True)
class Option:
    """The cost of one group."""

    num_uncached_tokens: int  # of the sequence, if placed here
    num_backlog_tokens: int  # still to be computed for other requests
    num_live: int  # requests
    has_adapter: bool = True  # what it needs is in the worker's memory

    @property
    def cost(self) -> tuple[int, int]:
        """(cost, load) in tokens; equal costs go to the smallest load."""
        load = self.num_backlog_tokens + TOKENS_PER_LIVE_REQUEST * self.num_live
        num_own = self.num_uncached_tokens + TOKENS_PER_ADAPTER * (not self.has_adapter)
        return num_own + load, load


def option_of(scheduler: Scheduler, sequence: Sequence) -> Option:
    """The cost of a scheduler's group for a sequence that is not placed yet."""
    table, index = scheduler.internal_state.table, scheduler.internal_state.running.index
    adapter_id = sequence.request.adapter_id
    behind = table.num_tokens[index] - table.num_computed[index] - 1  # excludes the newest
    return Option(
        num_uncached_tokens=len(sequence.token_ids) - scheduler.num_cached_tokens(sequence),
        num_backlog_tokens=scheduler.internal_state.waiting.num_tokens
        + int(np.maximum(behind, 0).sum()),
        num_live=scheduler.num_running + scheduler.num_waiting,
        has_adapter=not adapter_id
        or scheduler.internal_state.requirements.has_had_adapter(adapter_id),
    )


def preferred(
    ranked: list[int], options: Options[Option], names: Options[str], key: tuple[str, str]
) -> list[int]:
    """The ranking with the group in front that is drawn for a key, if it costs little more.

    Little is a quarter of what the sequence would have to compute. Each of `names` is a group's:
    a key draws the same one as long as that group is there, whichever others come and go.
    """
    best = options[ranked[0]]
    most = best.cost[0] + best.num_uncached_tokens // 4
    near = [index for index in ranked if options[index].cost[0] <= most]

    def drawn(index: int) -> bytes:
        told = "\0".join((names[index], *key)).encode()
        return blake2b(told, digest_size=8).digest()

    first = max(near, key=drawn)
    return [first, *(index for index in ranked if index != first)]


def ranking(options: Options[Option]) -> list[int]:
    """Indices of the options from the smallest cost; ties in the order given."""
    return sorted(range(len(options)), key=lambda index: options[index].cost)
