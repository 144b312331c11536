"""Counts of cores since the scheduler started, those of groups that are gone included."""

from collections import Counter
from collections.abc import Callable

from scheduler_svc.core import Scheduler

COUNTERS: dict[str, Callable[[Scheduler], int]] = {
    "num_steps": lambda core: core.counters.num_steps,
    "prefix_query_tokens": lambda core: core.counters.prefix_query_tokens,
    "prefix_hit_tokens": lambda core: core.counters.prefix_hit_tokens,
    "returned_query_tokens": lambda core: core.counters.returned_query_tokens,
    "returned_hit_tokens": lambda core: core.counters.returned_hit_tokens,
    "num_evictions": lambda core: core.view.num_evictions,
    "num_awaited_evictions": lambda core: core.view.num_awaited_evicted,
    "num_forks": lambda core: core.counters.num_forks,
    "num_swapped_out_blocks": lambda core: core.view.num_swapped_out,
    "num_swapped_in_blocks": lambda core: core.view.num_swapped_in,
    "num_swapped_dropped_blocks": lambda core: core.view.num_swapped_dropped,
    "num_preemptions": lambda core: core.view.num_preemptions,
    "num_accepted": lambda core: core.num_accepted,
    "num_finished": lambda core: core.num_finished,
    "num_output_tokens": lambda core: core.num_output_tokens,
    "num_prefill_tokens": lambda core: core.counters.num_prefill_tokens,
    "num_capped_steps": lambda core: core.counters.num_capped_steps,
    "num_drafts": lambda core: core.counters.num_drafts,
    "num_drafted_tokens": lambda core: core.counters.num_drafted_tokens,
    "num_accepted_tokens": lambda core: core.counters.num_accepted_tokens,
    "num_expired": lambda core: core.num_expired,
}


class Totals:
    """Sums of the counters of cores that are gone."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()

    def add(self, core: Scheduler) -> None:
        """Adds what a core has counted."""
        for name, of in COUNTERS.items():
            self._sums[name] += of(core)

    def of(self, name: str) -> int:
        """The sum of one counter; 0 for what is no counter."""
        return self._sums[name]
