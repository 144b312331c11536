"""Rows that are refused: they compute as all others do, and their answer is the reason.

So the other rows of the step, and those that share a prefix, do not notice.
"""

from dataclasses import replace

import numpy as np

from wire.prompt_outputs import PromptOutput
from worker_svc.protocol.step import ROW_OK, ROW_REFUSED, StepOutput
from worker_svc.runner.batch_state import Staged


def with_refusals(staged: Staged, output: StepOutput) -> StepOutput:
    """The answer to a step, in which refused rows have a reason in place of tokens."""
    rows, table = staged.rows, staged.table
    is_refused = table.columns["is_refused"]
    if output.error or not is_refused[rows.slots].any():
        return output
    slots = rows.slots[rows.samples]
    if output.num_sampled is not None:
        slots = np.repeat(slots, output.num_sampled)
    refused = np.flatnonzero(is_refused[slots])
    status = np.full(len(slots), ROW_OK, np.uint8)
    if output.row_status is not None:
        status = output.row_status.copy()
    status[refused] = ROW_REFUSED
    errors = dict(output.row_errors)
    for row in refused.tolist():
        occupant = table.occupants[slots[row]]
        errors[row] = "it is refused" if occupant is None else occupant.sampling.refusal
    told = tuple(
        PromptOutput(one.owner, one.begin, one.end, is_finite=False)
        if is_refused[one.owner]
        else one
        for one in output.prompt_outputs
    )
    return replace(output, row_status=status, row_errors=errors, prompt_outputs=told)
