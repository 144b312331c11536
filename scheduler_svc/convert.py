"""Between the core's plain data and the wire's messages; both ways, and nothing else."""

import numpy as np

from pagewire.v1 import scheduler_pb2, types_pb2, worker_pb2
from rpc.columns import UINT8, UINT32, pack, unpack
from scheduler_svc.core import Finished, FinishReason, NewSequence, Request, StepPlan, StepResult
from scheduler_svc.sampling import Sampling, resolve

FINISH_REASONS = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: types_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: types_pb2.FINISH_REASON_ERROR,
}


def to_request(
    request_id: str,
    prompt_token_ids: np.ndarray[tuple[int], np.dtype[np.int32]],
    params: types_pb2.SamplingParams,
    *,
    client: int,
    handle: int,
    drawn_seed: int,
    arrival_s: float,
) -> Request:
    """A request for the core. Raises BadSampling naming a parameter out of range."""
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        min_tokens=params.min_tokens,
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        sampling=resolve(params, drawn_seed),
        client=client,
        handle=handle,
        arrival_s=arrival_s,
    )


def to_step(plan: StepPlan) -> worker_pb2.SchedulerOutput:
    """A plan as the worker reads it."""
    step = worker_pb2.SchedulerOutput(
        step_id=plan.step_id,
        ack_step_id=plan.ack_step_id,
        reset=plan.reset,
        same_rows=plan.same_rows,
    )
    if not plan.same_rows:
        step.slots = plan.slots.tobytes()
    if plan.num_scheduled is not None:
        step.num_scheduled = plan.num_scheduled.tobytes()
    if plan.freed_slots:
        step.freed_slots = pack(plan.freed_slots)
    if plan.appended_slots:
        step.appended_slots = pack(plan.appended_slots)
        step.appended_block_ids = pack(plan.appended_block_ids)
    for new in plan.new_sequences:
        step.new_sequences.append(_to_new_sequence(new))
    return step


def _to_new_sequence(new: NewSequence) -> worker_pb2.NewSequence:
    sampling = new.request.sampling
    assert isinstance(sampling, Sampling)
    return worker_pb2.NewSequence(
        slot=new.slot,
        request_id=new.request.request_id,
        token_ids=new.token_ids.tobytes(),
        num_prompt_tokens=len(new.request.prompt_token_ids),
        num_computed_tokens=new.num_computed_tokens,
        block_ids=pack(new.block_ids),
        sampling=worker_pb2.RowSampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            min_tokens=new.request.min_tokens,
            stop_token_ids=new.stop_ids if new.request.min_tokens else (),
        ),
    )


def to_result(output: worker_pb2.ModelRunnerOutput) -> StepResult:
    """A worker's answer for the core."""
    status = unpack(output.row_status, UINT8, name="row_status")
    return StepResult(
        step_id=output.step_id,
        token_ids=unpack(output.token_ids, name="token_ids").astype(np.int32, copy=False),
        bad_rows=tuple(np.flatnonzero(status).tolist()),
    )


def to_usage(finished: Finished) -> types_pb2.Usage:
    """Token counts of a finished request."""
    return types_pb2.Usage(
        prompt_tokens=finished.num_prompt_tokens,
        completion_tokens=finished.num_output_tokens,
        cached_tokens=finished.num_cached_tokens,
    )


def to_finished(finished: Finished, status_code: int) -> scheduler_pb2.Finished:
    """The end of a request as a gateway reads it; status_code is 0 unless it failed."""
    return scheduler_pb2.Finished(
        handle=finished.request.handle,
        reason=FINISH_REASONS[finished.reason],
        stop_token_id=finished.stop_token_id,
        usage=to_usage(finished),
        status_code=status_code,
        message=finished.message,
    )


def to_tokens(
    handles: np.ndarray[tuple[int], np.dtype[np.uint32]],
    token_ids: np.ndarray[tuple[int], np.dtype[np.int32]],
) -> scheduler_pb2.SessionResponse:
    """Tokens of one client as columns."""
    return scheduler_pb2.SessionResponse(
        handles=handles.astype(UINT32, copy=False).tobytes(),
        token_ids=token_ids.astype("<i4", copy=False).tobytes(),
    )
