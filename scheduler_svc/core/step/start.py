"""The position at which an admitted sequence begins to compute."""

from dataclasses import dataclass, field

from scheduler_svc.core.request.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Start:
    """KV that an admitted sequence need not compute.

    Its block table lists null blocks, shared blocks, and new ones. The host blocks are copied into
    the first of the new ones, or the beginning of `copied_from` into the very first.
    """

    num_computed: int = 0  # tokens with KV before the step computes
    num_null: int = 0  # leading blocks before every window
    shared: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    copied_from: int | None = None
    sibling: Sequence | None = None  # sequence that holds the shared or copied blocks
