"""Snapshots of states that slots are to make: those due in a step, and those of later ones.

Host arithmetic over token counts; the model's states are copied elsewhere.
"""

from dataclasses import dataclass

from worker_svc.protocol.step import BadStep, IntColumn, SaveRequest
from worker_svc.runner.rows import Rows

Pending = dict[int, tuple[SaveRequest, ...]]  # by slot, in order of their positions


@dataclass(frozen=True, slots=True)
class DueSave:
    """The states of a row after some of the tokens that it computes go into a snapshot."""

    row: int
    slot: int
    num_tokens: int  # of the row's
    snapshot: int


@dataclass(frozen=True, slots=True)
class DueSaves:
    """The snapshots that a step makes."""

    within: tuple[DueSave, ...] = ()  # before a row's last token, in order of rows and tokens
    at_ends: tuple[DueSave, ...] = ()


NONE_DUE = DueSaves()


def add_saves(pending: Pending, saves: tuple[SaveRequest, ...], num_computed: IntColumn) -> None:
    """Adds snapshots to make, given the computed tokens of all slots. Raises BadStep."""
    for save in saves:
        before = pending.get(save.slot, ())
        after = before[-1].position if before else int(num_computed[save.slot])
        if save.position <= after:
            raise BadStep(
                "state_save_positions",
                f"{save.position} of slot {save.slot} is not after {after}",
            )
        pending[save.slot] = (*before, save)


def take_due(pending: Pending, rows: Rows) -> DueSaves:
    """Removes the snapshots that these rows make from those that are pending."""
    if not pending:
        return NONE_DUE
    within: list[DueSave] = []
    at_ends: list[DueSave] = []
    for row, slot in enumerate(rows.slots.tolist()):
        saves = pending.get(slot)
        if saves is None:
            continue
        begin, count = int(rows.num_computed[row]), int(rows.num_scheduled[row])
        num_due = sum(save.position <= begin + count for save in saves)
        for save in saves[:num_due]:
            due = DueSave(row, slot, save.position - begin, save.snapshot)
            (at_ends if due.num_tokens == count else within).append(due)
        if num_due == len(saves):
            del pending[slot]
        else:
            pending[slot] = saves[num_due:]
    return DueSaves(tuple(within), tuple(at_ends))
