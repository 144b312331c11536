"""Prompt reports: reading inverts writing, and inconsistent ones are refused by name."""

from itertools import pairwise

import numpy as np
import pytest

from pagewire.v1 import types_pb2
from wire.columns import BadColumn
from wire.logprobs import LogprobColumns
from wire.prompt_outputs import HiddenMean, PromptOutput


def columns(num_rows: int, num_top: int) -> LogprobColumns:
    rows = np.arange(num_rows)
    top = np.arange(num_rows * num_top).reshape(num_rows, num_top)
    return LogprobColumns(rows, -rows.astype(np.float32), rows + 1, top, -top.astype(np.float32))


def packed(prompt_output: PromptOutput) -> types_pb2.PromptOutput:
    message = types_pb2.PromptOutput(**prompt_output.pack())
    if prompt_output.logprobs is not None:
        message.logprobs.CopyFrom(types_pb2.LogprobColumns(**prompt_output.logprobs.pack()))
    return types_pb2.PromptOutput.FromString(message.SerializeToString())


@pytest.mark.parametrize("num_top", [0, 3])
def test_log_probabilities_come_back_as_they_were(num_top: int) -> None:
    prompt_output = PromptOutput(5, 10, 14, logprobs=columns(4, num_top))
    read = PromptOutput.unpack(packed(prompt_output))
    assert (read.owner, read.begin, read.end, read.is_finite) == (5, 10, 14, True)
    assert read.logprobs is not None and prompt_output.logprobs is not None
    assert read.logprobs.pack() == prompt_output.logprobs.pack()
    assert read.hidden_sum is None


def test_hidden_states_come_back_as_they_were() -> None:
    prompt_output = PromptOutput(0, 0, 2, hidden_sum=np.array([0.5, -2, 1e-30], dtype=np.float32))
    read = PromptOutput.unpack(packed(prompt_output))
    assert read.hidden_sum is not None and read.hidden_sum.tolist() == [0.5, -2, np.float32(1e-30)]


def test_what_is_not_finite_tells_nothing_else() -> None:
    prompt_output = PromptOutput(3, 4, 6, is_finite=False)
    assert PromptOutput.unpack(packed(prompt_output)) == prompt_output


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
    message = packed(PromptOutput(5, 10, 14, logprobs=columns(4, 1)))
    for name, value in spoil.items():
        if isinstance(value, types_pb2.LogprobColumns):
            message.logprobs.CopyFrom(value)
        else:
            setattr(message, name, value)
    with pytest.raises(BadColumn):
        PromptOutput.unpack(message)


def test_a_mean_does_not_depend_on_how_a_prompt_was_cut() -> None:
    states = np.random.default_rng(0).normal(size=(100, 6)).astype(np.float32) * 50
    means = []
    for cuts in ([0, 100], [0, 1, 100], [0, 33, 66, 99, 100]):
        mean = HiddenMean()
        for begin, end in pairwise(cuts):
            mean.add(PromptOutput(0, begin, end, hidden_sum=states[begin:end].sum(0)))
        means.append(mean.value())
    for found in means:
        assert found == pytest.approx(states.mean(0, dtype=np.float64), abs=1e-5)
    assert HiddenMean().value() is None
