"""Where a sequence begins to compute when it gets a slot."""

from dataclasses import dataclass, field

from scheduler_svc.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Start:
    """What an entering sequence need not compute.

    Its block table then lists null blocks, shared blocks, and new ones; the host's blocks go into
    the first of the new ones, or the beginning of `copied_from` into the very first.
    """

    num_computed: int = 0  # tokens whose KV is there before the step's rows compute
    num_null: int = 0  # leading blocks behind the window of every token to come
    shared: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    copied_from: int | None = None
    sibling: Sequence | None = None  # who holds the blocks that are shared or copied
