"""Batch sizes that are captured, of which every batch finds one."""

import pytest

from worker_svc.runner.graphs.decode_graphs import batch_sizes, size_for


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 7, 8, 9, 17, 20, 100, 256, 1000])
def test_every_batch_up_to_the_limit_has_a_size_and_none_is_larger(max_num_seqs: int) -> None:
    sizes = batch_sizes(max_num_seqs)
    assert sizes[-1] == max_num_seqs
    assert sizes == tuple(sorted(set(sizes)))
    for num_rows in range(1, max_num_seqs + 1):
        size = size_for(sizes, num_rows)
        assert size in sizes
        assert size >= num_rows
        assert not any(num_rows <= smaller < size for smaller in sizes)


def test_little_is_padded() -> None:
    sizes = batch_sizes(256)
    assert [size_for(sizes, n) for n in (1, 2, 3, 4, 5, 8, 9, 255)] == [1, 2, 4, 4, 8, 8, 16, 256]
