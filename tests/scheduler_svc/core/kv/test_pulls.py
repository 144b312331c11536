"""Pulls and loans alone: what is held, and until when."""

import numpy as np
import pytest

from scheduler_svc.core.kv.block_pool import BlockPool
from scheduler_svc.core.kv.loans import Leaving, Loans
from scheduler_svc.core.kv.pulls import LentBlocks, PullCounts, Pulls
from scheduler_svc.core.kv.transfers import TransferCounts
from scheduler_svc.core.request.sequence import Sequence
from tests.scheduler_svc.core.builders import make_request


def sequence_of(num_tokens: int = 20) -> Sequence:
    return Sequence(make_request("a", np.arange(num_tokens)), 64, ())


def made(num_blocks: int = 11) -> tuple[Pulls, BlockPool, list[LentBlocks]]:
    pool, ended = BlockPool(num_blocks, 4), list[LentBlocks]()
    return Pulls(pool, 4, TransferCounts(), PullCounts(), ended), pool, ended


LENT = LentBlocks("elsewhere", 7, [30, 31, 2**31 - 1], 10)


def test_blocks_of_a_cancelled_pull_are_free_only_once_it_is_answered() -> None:
    """Else a late byte would fall into another request's KV."""
    pulls, pool, ended = made()
    transfer_id = pulls.begin(sequence_of(), LENT, [])
    assert transfer_id is not None and pool.num_free == 7
    assert pulls.take(0.0, 0.0) is not None
    pulls.cancel(transfer_id)
    assert pool.num_free == 7 and not ended, "the worker may still read and write"
    told = pulls.take(0.0, 0.0)
    assert told is not None and told.cancelled_ids == (transfer_id,)
    pulls.done(transfer_id, 3)
    assert pool.num_free == 10 and ended == [LENT]
    pulls.done(transfer_id, 3)
    assert pool.num_free == 10 and ended == [LENT], "the second answer is void"


def test_a_pull_that_the_worker_never_heard_of_ends_at_once() -> None:
    pulls, pool, ended = made()
    transfer_id = pulls.begin(sequence_of(), LENT, [])
    assert transfer_id is not None
    pulls.cancel(transfer_id)
    assert pool.num_free == 10 and ended == [LENT] and pulls.take(0.0, 0.0) is None


def test_what_does_not_fit_is_given_back_and_takes_nothing() -> None:
    pulls, pool, ended = made(num_blocks=3)
    assert pulls.begin(sequence_of(), LENT, []) is None
    assert pool.num_free == 2 and ended == [LENT] and not len(pulls)


@pytest.mark.parametrize(("num_blocks", "num_tokens"), [(0, 0), (1, 4), (2, 8), (3, 10), (99, 10)])
def test_a_sequence_enters_with_the_blocks_that_came(num_blocks: int, num_tokens: int) -> None:
    """The last one is filled in part; of those that did not come nothing is held."""
    pulls, pool, _ = made()
    sequence = sequence_of()
    transfer_id = pulls.begin(sequence, LENT, [])
    assert transfer_id is not None
    pulls.done(transfer_id, num_blocks)
    arrived = pulls.find(sequence)
    assert (0 if arrived is None else arrived.num_tokens) == num_tokens
    assert pool.num_free == 10 - min(num_blocks, 3)
    pulls.drop(sequence)
    assert pool.num_free == 10


def test_a_pull_is_late_after_ten_times_what_blocks_took_and_at_least_a_second() -> None:
    pulls, _, _ = made()
    first = pulls.begin(sequence_of(), LENT, [])
    pulls.take(100.0, 0.5)
    assert pulls.next_due_s == 115.0 and pulls.overdue(114.9) == []
    assert pulls.overdue(115.0) == [first]
    second = pulls.begin(sequence_of(), LENT, [])
    pulls.take(100.0, 0.0)
    assert pulls.overdue(101.0) == [second]


def test_a_sequence_leaves_once_the_step_that_computed_it_is_answered() -> None:
    """Before, its blocks would be read while the device still writes them."""
    pool, sequence = BlockPool(11, 4), sequence_of()
    loans, blocks = Loans(pool), pool.take(3)
    loans.begin(Leaving(1, sequence, blocks, 10, last_step=8))
    pool.release(blocks)
    assert loans.due(7) == [] and pool.num_free == 7
    assert [one.sequence for one in loans.due(8)] == [sequence]
    sequence.num_awaited = 1
    assert loans.due(8) == [], "its token is on the way"
    loans.left(1)
    assert pool.num_free == 7, "the receiver reads"
    loans.give_back(1)
    loans.give_back(1)
    assert pool.num_free == 10
