"""A sequence that is swapped out to the host and in again while others compute, as steps to play.

Its old blocks are overwritten at once and it comes back to others, so only what was swapped tells
its keys and values. Knows no runner: limits and a client are given.
"""

from dataclasses import dataclass, replace

import numpy as np

from tests.gpu.test_cuda_runner import Client, column, make_prompt
from worker_svc.protocol.step import NewSequence, RowSampling, StepMoves

LEAVING, STAYING, ARRIVING, LATE = 0, 1, 2, 4  # slots; the blocks of 3 are where it comes back
NUM_HOST_BLOCKS = 6
HOST_BLOCKS = [5, 0, 2]
GREEDY = RowSampling()
DRAWN = RowSampling(temperature=1.3, seed=5)
NOTHING = column([])


@dataclass(frozen=True, slots=True)
class SwapPlay:
    """Steps of a few rows; with `arrives` a prompt shares each step that swaps.

    With `swaps` False the same sequence only pauses, and the tokens must be the same.
    """

    block_size: int
    blocks_per_seq: int
    arrives: bool
    swaps: bool = True

    def __call__(self, client: Client) -> None:
        num_prompt = 2 * self.block_size + 5
        prompt = make_prompt(num_prompt, seed=1)
        new = (
            self._enter(client, LEAVING, prompt, DRAWN),
            self._enter(client, STAYING, make_prompt(self.block_size + 3, seed=2), GREEDY),
        )
        client.launch({LEAVING: num_prompt, STAYING: self.block_size + 3}, new_sequences=new)
        client.launch({LEAVING: 1, STAYING: 1})
        client.drain()
        known = client.tokens[LEAVING]
        rows = self._swap_out(client)
        client.launch(rows)
        self._swap_in(client, rows, prompt, known)
        for _ in range(3):
            client.launch(dict.fromkeys([*rows, LEAVING], 1))
        client.drain()
        client.tokens[LEAVING] = known + client.tokens[LEAVING] if self.swaps else known

    def _swap_out(self, client: Client) -> dict[int, int]:
        """Returns the rows that go on, one token each."""
        held, rows, new = self._blocks(LEAVING)[:3], {STAYING: 1}, ()
        if self.arrives:
            one = self._enter(client, ARRIVING, make_prompt(2 * self.block_size + 1, seed=3), DRAWN)
            if self.swaps:  # its prompt overwrites what was just swapped out
                one = replace(one, block_ids=np.concatenate([held, one.block_ids[3:]]))
            new, rows = (one,), {STAYING: 1, ARRIVING: 2 * self.block_size + 1}
        moves = StepMoves(
            held, column(HOST_BLOCKS), NOTHING, NOTHING, self._blocks(STAYING)[:3], held
        )
        changes = {"freed_slots": column([LEAVING]), "moves": moves} if self.swaps else {}
        client.launch(rows, new_sequences=new, **changes)
        return dict.fromkeys(rows, 1)

    def _swap_in(
        self, client: Client, rows: dict[int, int], prompt: list[int], known: list[int]
    ) -> None:
        new, changes, together = [], {}, rows | {LEAVING: 1}
        if self.swaps:
            blocks = self._blocks(3)[[2, 0, 1, *range(3, self.blocks_per_seq)]]
            back = self._enter(client, LEAVING, prompt + known, DRAWN)
            num_computed = len(prompt) + len(known) - 1
            new.append(
                replace(
                    back,
                    num_prompt_tokens=len(prompt),
                    num_computed_tokens=num_computed,
                    block_ids=blocks,
                )
            )
            changes["moves"] = StepMoves(
                NOTHING, NOTHING, column(HOST_BLOCKS), blocks[:3].astype(np.int64), NOTHING, NOTHING
            )
        if self.arrives:
            late = make_prompt(self.block_size + 1, seed=6)
            new.append(self._enter(client, LATE, late, GREEDY))
            together |= {LATE: len(late)}
        client.launch(together, new_sequences=tuple(new), **changes)
        if self.arrives:
            rows[LATE] = 1

    def _enter(
        self, client: Client, slot: int, prompt: list[int], sampling: RowSampling
    ) -> NewSequence:
        blocks = self._blocks(slot).astype(np.int32)
        return replace(client.enter(slot, prompt, sampling), block_ids=blocks)

    def _blocks(self, slot: int) -> np.ndarray:
        return 1 + slot * self.blocks_per_seq + np.arange(self.blocks_per_seq)
