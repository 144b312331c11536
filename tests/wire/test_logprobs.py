"""Columns of log probabilities: each token keeps its own values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.v1 import types_pb2
from wire.columns import BadColumn, pack
from wire.logprobs import LogprobColumns, join


def columns_of(tokens: dict[int, float], width: int = 2) -> LogprobColumns:
    """Columns in which each token's values are functions of its own number."""
    rows = np.array(sorted(tokens), dtype=np.int32)
    own = np.array([tokens[row] for row in sorted(tokens)], dtype=np.float32)
    top = own[:, None] + np.arange(width, dtype=np.float32)
    return LogprobColumns(rows, own, own.astype(np.int32) + 1, top.astype(np.int32), top)


def tokens_of(columns: LogprobColumns | None) -> dict[int, float]:
    if columns is None:
        return {}
    for own, rank, ids, tops in zip(
        columns.logprobs, columns.ranks, columns.top_token_ids, columns.top_logprobs, strict=True
    ):
        assert rank == own + 1
        assert (ids == tops).all() and (not len(ids) or ids[0] == own)
    return dict(zip(columns.rows.tolist(), columns.logprobs.tolist(), strict=True))


TOKENS = st.dictionaries(st.integers(0, 9), st.integers(0, 1000).map(float), min_size=1)


@given(TOKENS, st.integers(0, 3))
def test_what_is_packed_comes_out_again(tokens: dict[int, float], width: int) -> None:
    message = types_pb2.LogprobColumns(**columns_of(tokens, width).pack())
    read = LogprobColumns.unpack(message, 10)
    assert tokens_of(read) == tokens
    assert read is not None and read.top_token_ids.shape == (len(tokens), width)


@given(TOKENS, st.permutations(range(10)), st.integers(0, 10))
def test_a_selection_takes_every_tokens_own(
    tokens: dict[int, float], order: list[int], count: int
) -> None:
    chosen = order[:count]
    selected = columns_of(tokens).select(np.array(chosen, dtype=np.int64))
    expected = {place: tokens[row] for place, row in enumerate(chosen) if row in tokens}
    assert tokens_of(selected) == expected


@given(st.lists(st.tuples(TOKENS | st.just({}), st.integers(0, 3)), max_size=4))
def test_messages_put_together_are_counted_through(
    parts: list[tuple[dict[int, float], int]],
) -> None:
    joined = join((10, columns_of(t, width) if t else None) for t, width in parts)
    expected = {
        10 * index + row: own for index, (t, _) in enumerate(parts) for row, own in t.items()
    }
    read = {} if joined is None else dict(zip(joined.rows.tolist(), joined.logprobs, strict=True))
    assert read == expected


def test_no_columns_are_none() -> None:
    assert LogprobColumns.unpack(types_pb2.LogprobColumns(), 5) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rows", pack([1, 1])),
        ("rows", pack([1, 10])),
        ("rows", pack([-1, 1])),
        ("rows", b"\0"),
        ("logprobs", b"\0" * 4),
        ("ranks", b"\0" * 12),
        ("top_token_ids", b"\0" * 12),
        ("top_logprobs", b"\0" * 24),
        ("top_logprobs", b"\0" * 7),
    ],
)
def test_columns_that_do_not_fit_together_are_refused(field: str, value: bytes) -> None:
    packed = columns_of({1: 5.0, 2: 6.0}).pack() | {field: value}
    with pytest.raises(BadColumn, match="logprobs"):
        LogprobColumns.unpack(types_pb2.LogprobColumns(**packed), 10)
