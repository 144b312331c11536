"""The position at which an admitted sequence begins to compute."""

from dataclasses import dataclass, field

from scheduler_svc.core.request.sequence import Sequence


@dataclass(frozen=True, slots=True)
class TableStart:
    """The blocks of one KV group that hold what an admitted sequence need not compute."""

    num_null: int = 0  # leading blocks before every window
    shared: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    copied_from: int | None = None
    given: list[int] = field(default_factory=list)  # the sequence's own already


@dataclass(frozen=True, slots=True)
class Start:
    """KV that an admitted sequence need not compute.

    Its block table lists null blocks, shared blocks, given ones, and new ones. The host blocks are
    copied into the first of the new ones, or the beginning of `copied_from` into the very first.
    """

    num_computed: int = 0  # tokens with KV before the step computes
    num_null: int = 0  # leading blocks before every window; of group 0, as the next ones
    shared: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    copied_from: int | None = None
    sibling: Sequence | None = None  # sequence that holds the shared or copied blocks
    more: tuple[TableStart, ...] = ()  # of the groups after group 0
    snapshot: int | None = None  # of the states after the computed tokens; None: zeros
    num_matched: int = 0  # tokens whose KV is cached, of a sequence with states
    given: list[int] = field(default_factory=list)  # after the shared ones, its own already

    @classmethod
    def of(
        cls, num_computed: int, tables: list[TableStart], sibling: Sequence | None = None
    ) -> "Start":
        """The start with these tables, by group."""
        first, *more = tables
        return cls(
            num_computed,
            first.num_null,
            first.shared,
            first.host_blocks,
            first.copied_from,
            sibling,
            tuple(more),
        )

    @property
    def tables(self) -> "tuple[Start | TableStart, ...]":
        """The blocks of each group."""
        return (self, *self.more)

    @property
    def all_shared(self) -> list[int]:
        """The shared blocks of all groups."""
        if not self.more:
            return self.shared
        return [block_id for table in self.tables for block_id in table.shared]
