"""Prompt reports: reading inverts writing, and inconsistent ones are refused by name."""

from itertools import pairwise

import numpy as np
import pytest

from pagewire.v1 import types_pb2
from wire.columns import BadColumn
from wire.logprobs import LogprobColumns
from wire.prompt_outputs import HiddenMean, PromptReport


def columns(num_rows: int, num_top: int) -> LogprobColumns:
    rows = np.arange(num_rows)
    top = np.arange(num_rows * num_top).reshape(num_rows, num_top)
    return LogprobColumns(rows, -rows.astype(np.float32), rows + 1, top, -top.astype(np.float32))


def packed(report: PromptReport) -> types_pb2.PromptReport:
    message = types_pb2.PromptReport(**report.pack())
    if report.logprobs is not None:
        message.logprobs.CopyFrom(types_pb2.LogprobColumns(**report.logprobs.pack()))
    return types_pb2.PromptReport.FromString(message.SerializeToString())


@pytest.mark.parametrize("num_top", [0, 3])
def test_log_probabilities_come_back_as_they_were(num_top: int) -> None:
    report = PromptReport(5, 10, 14, logprobs=columns(4, num_top))
    read = PromptReport.unpack(packed(report))
    assert (read.owner, read.begin, read.end, read.is_finite) == (5, 10, 14, True)
    assert read.logprobs is not None and report.logprobs is not None
    assert read.logprobs.pack() == report.logprobs.pack()
    assert read.hidden_sum is None


def test_hidden_states_come_back_as_they_were() -> None:
    report = PromptReport(0, 0, 2, hidden_sum=np.array([0.5, -2, 1e-30], dtype=np.float32))
    read = PromptReport.unpack(packed(report))
    assert read.hidden_sum is not None and read.hidden_sum.tolist() == [0.5, -2, np.float32(1e-30)]


def test_what_is_not_finite_tells_nothing_else() -> None:
    report = PromptReport(3, 4, 6, is_finite=False)
    assert PromptReport.unpack(packed(report)) == report


@pytest.mark.parametrize(
    "spoil",
    [
        {"count": 3},
        {"count": 0},
        {"hidden_sum": b"\0" * 8},
        {"logprobs": types_pb2.LogprobColumns()},
        {"logprobs": types_pb2.LogprobColumns(rows=b"\0" * 4)},
    ],
)
def test_parts_that_do_not_fit_each_other_are_refused(spoil: dict[str, object]) -> None:
    message = packed(PromptReport(5, 10, 14, logprobs=columns(4, 1)))
    for name, value in spoil.items():
        if isinstance(value, types_pb2.LogprobColumns):
            message.logprobs.CopyFrom(value)
        else:
            setattr(message, name, value)
    with pytest.raises(BadColumn):
        PromptReport.unpack(message)


def test_a_mean_does_not_depend_on_how_a_prompt_was_cut() -> None:
    states = np.random.default_rng(0).normal(size=(100, 6)).astype(np.float32) * 50
    means = []
    for cuts in ([0, 100], [0, 1, 100], [0, 33, 66, 99, 100]):
        mean = HiddenMean()
        for begin, end in pairwise(cuts):
            mean.add(PromptReport(0, begin, end, hidden_sum=states[begin:end].sum(0)))
        means.append(mean.value())
    for found in means:
        assert found == pytest.approx(states.mean(0, dtype=np.float64), abs=1e-5)
    assert HiddenMean().value() is None
