"""Handlers of WorkerService: convert messages, map exceptions to statuses, pass bytes on.

All decisions are made in `session` and `lifecycle`.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import grpc
import torch

from pagewire.v1 import timing_pb2, types_pb2, worker_pb2
from wire.deaths import OWN_END
from wire.grammar import LLGUIDANCE_VERSION
from wire.sealed import BadFrame, SealCheck, Sealer
from wire.versions import STEP_MINOR
from worker_svc.adapters.store import Names, NameTaken
from worker_svc.config import DTYPES
from worker_svc.device.step_clock import DecodeTime
from worker_svc.process.pending_hellos import PendingHellos
from worker_svc.protocol import codec
from worker_svc.protocol.kv_groups import LayerGroup
from worker_svc.protocol.step import BadStep
from worker_svc.serving.scheduler_stream import SchedulerStream
from worker_svc.serving.session import Refusal, Session
from worker_svc.serving.session_errors import (
    FrameLost,
    StaleEpoch,
    StepGap,
    Stopping,
    TakenOver,
    UnknownProtocol,
)
from worker_svc.startup.description import Description, ModelFacts, TierFacts
from worker_svc.startup.kv_sizing import CacheTooSmall
from worker_svc.startup.lifecycle import Lifecycle, WorkerPhase, WrongPhase

SERVICE_NAME = "pagewire.v1.WorkerService"
HELLO_TIMEOUT_S = 30.0  # from the start of a stream to its first frame

log = logging.getLogger(__name__)
T = TypeVar("T")

PHASES: dict[WorkerPhase, worker_pb2.WorkerPhase] = {
    WorkerPhase.STARTED: worker_pb2.WORKER_PHASE_STARTED,
    WorkerPhase.LOADING: worker_pb2.WORKER_PHASE_LOADING,
    WorkerPhase.LOADED: worker_pb2.WORKER_PHASE_LOADED,
    WorkerPhase.CACHE_READY: worker_pb2.WORKER_PHASE_CACHE_READY,
    WorkerPhase.READY: worker_pb2.WORKER_PHASE_READY,
    WorkerPhase.FAILED: worker_pb2.WORKER_PHASE_FAILED,
}

# The first class that matches gives the status; other exceptions are INTERNAL.
STATUSES: tuple[tuple[type[BaseException], grpc.StatusCode], ...] = (
    (BadStep, grpc.StatusCode.INVALID_ARGUMENT),
    (FrameLost, grpc.StatusCode.DATA_LOSS),
    (StepGap, grpc.StatusCode.ABORTED),
    (TakenOver, grpc.StatusCode.ABORTED),
    (StaleEpoch, grpc.StatusCode.FAILED_PRECONDITION),
    (WrongPhase, grpc.StatusCode.FAILED_PRECONDITION),
    (UnknownProtocol, grpc.StatusCode.FAILED_PRECONDITION),
    (Stopping, grpc.StatusCode.UNAVAILABLE),
    (CacheTooSmall, grpc.StatusCode.INVALID_ARGUMENT),
    (NameTaken, grpc.StatusCode.ALREADY_EXISTS),
    (torch.OutOfMemoryError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (MemoryError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (OSError, grpc.StatusCode.INVALID_ARGUMENT),
    (ValueError, grpc.StatusCode.INVALID_ARGUMENT),
)


class WorkerService:
    """Handlers of WorkerService."""

    def __init__(self, lifecycle: Lifecycle, session: Session) -> None:
        self._lifecycle = lifecycle
        self._session = session
        self._pending = PendingHellos()

    def describe(
        self, request: worker_pb2.DescribeRequest, context: grpc.ServicerContext
    ) -> worker_pb2.DescribeResponse:
        description = self._lifecycle.description
        runner = self._lifecycle.runner
        session = self._session
        session.hold.hear(request.held_epoch, session.epoch)
        return worker_pb2.DescribeResponse(
            phase=PHASES[self._lifecycle.phase],
            failure=self._lifecycle.failure,
            description=None if description is None else to_description(description),
            epoch=session.epoch,
            last_step_id=session.last_step_id,
            num_live_slots=0 if runner is None else len(runner.state.table.live_slots),
            decode_time=None if runner is None else to_decode_time(runner.decode_time),
            is_attached=session.is_attached,
            unheard_ms=session.hold.unheard_ms,
            refusal=None if session.refusal is None else to_refusal(session.refusal),
        )

    def load_model(
        self, request: worker_pb2.LoadModelRequest, context: grpc.ServicerContext
    ) -> worker_pb2.LoadModelResponse:
        if not request.path:
            _abort(context, BadStep("path", "must name a model folder"))
        dtype = request.dtype or "auto"
        if dtype not in DTYPES:
            _abort(context, BadStep("dtype", f"{dtype!r} is not one of {', '.join(DTYPES)}"))
        facts = _answer(
            context,
            lambda: self._lifecycle.load_model(
                Path(request.path), dtype, request.served_model_name
            ),
        )
        return worker_pb2.LoadModelResponse(model=to_model_info(facts))

    def initialize_cache(
        self, request: worker_pb2.InitializeCacheRequest, context: grpc.ServicerContext
    ) -> worker_pb2.InitializeCacheResponse:
        num_blocks = _answer(context, lambda: self._lifecycle.initialize_cache(request.num_blocks))
        return worker_pb2.InitializeCacheResponse(num_blocks=num_blocks)

    def warm_up(
        self, request: worker_pb2.WarmUpRequest, context: grpc.ServicerContext
    ) -> worker_pb2.WarmUpResponse:
        description = _answer(context, self._lifecycle.warm_up)
        return worker_pb2.WarmUpResponse(description=to_description(description))

    def load_adapter(
        self, request: worker_pb2.LoadAdapterRequest, context: grpc.ServicerContext
    ) -> worker_pb2.LoadAdapterResponse:
        names = _answer(context, self._names)
        load = partial(names.load, request.name, request.path, replaces=request.replaces)
        return worker_pb2.LoadAdapterResponse(
            adapter=types_pb2.Adapter(**_answer(context, load).fields())
        )

    def unload_adapter(
        self, request: worker_pb2.UnloadAdapterRequest, context: grpc.ServicerContext
    ) -> worker_pb2.UnloadAdapterResponse:
        if not _answer(context, self._names).unload(request.name):
            context.abort(grpc.StatusCode.NOT_FOUND, f"no adapter is named {request.name!r}")
        return worker_pb2.UnloadAdapterResponse()

    def _names(self) -> Names:
        """The names of adapters. Raises WrongPhase where the worker has none, or not yet."""
        adapters = self._lifecycle.ready_runner().state.adapters
        if adapters is None:
            raise WrongPhase("this worker serves no adapters; --max-loras has it serve some")
        return adapters.names

    def attach(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Writes the frames of one stream; a separate thread reads the scheduler's frames.

        Frames stay bytes here: the compute thread parses them in order, so that a frame that does
        not parse ends the stream with our status instead of an error inside gRPC.
        """
        hurry = threading.Timer(HELLO_TIMEOUT_S, context.cancel)  # a stream occupies a thread
        hurry.daemon = True
        hurry.start()
        try:
            with self._pending.waiting(context.cancel):
                first = next(frames, None)
        finally:
            hurry.cancel()
        if first is None:
            _abort(context, BadStep("frame", "the stream ended before hello"))
        check = SealCheck()
        stream = _answer(context, lambda: self._session.attach(_hello(check, first)))
        # Called however the call ends, so the worker is free as soon as a scheduler disappears.
        if not context.add_callback(lambda: self._session.end(stream, None)):
            self._session.end(stream, None)
        threading.Thread(
            target=self._read,
            args=(frames, stream, check),
            name=f"reader-{stream.epoch}",
            daemon=True,
        ).start()
        description = self._lifecycle.description
        assert description is not None  # set, since attach was accepted
        told = to_description(description)
        if description.has_states and not stream.may_draft_states:
            told.verifies_drafts = False
        greeting = worker_pb2.AttachResponse(description=told)
        self._session.greet(stream, greeting.SerializeToString())
        answers = map(Sealer().seal, iter(lambda: _answer(context, stream.next_frame), None))
        yield from stream.faults.leaving(answers) if stream.faults else answers

    def _read(self, frames: Iterator[bytes], stream: SchedulerStream, check: SealCheck) -> None:
        if stream.faults:
            frames = stream.faults.arriving(frames)
        try:
            for frame in frames:
                check.check(frame)
                if self._session.cut(stream, frame):  # handled now, ahead of the queued frames
                    continue
                handlers = self._session.prepare, self._session.adapt, self._session.transfer
                if any(handle(stream, frame) for handle in handlers):
                    continue
                stream.wait_for_room()
                if stream.is_over:
                    return
                self._session.submit(stream, frame)
        except grpc.RpcError:  # gRPC's sign that the call is over
            return
        except BadFrame as error:
            log.warning("epoch %d ends: %s", stream.epoch, error)
            self._session.end(stream, FrameLost(str(error)))
            return
        self._session.finish(stream)


def add_to_server(service: WorkerService, server: grpc.Server) -> None:
    """Registers the handlers; Attach takes and returns bytes instead of messages."""
    unary = grpc.unary_unary_rpc_method_handler
    methods: dict[str, tuple[Callable[..., Any], Any, Any]] = {
        "Describe": (
            service.describe,
            worker_pb2.DescribeRequest,
            worker_pb2.DescribeResponse,
        ),
        "LoadAdapter": (
            service.load_adapter,
            worker_pb2.LoadAdapterRequest,
            worker_pb2.LoadAdapterResponse,
        ),
        "UnloadAdapter": (
            service.unload_adapter,
            worker_pb2.UnloadAdapterRequest,
            worker_pb2.UnloadAdapterResponse,
        ),
        "LoadModel": (
            service.load_model,
            worker_pb2.LoadModelRequest,
            worker_pb2.LoadModelResponse,
        ),
        "InitializeCache": (
            service.initialize_cache,
            worker_pb2.InitializeCacheRequest,
            worker_pb2.InitializeCacheResponse,
        ),
        "WarmUp": (service.warm_up, worker_pb2.WarmUpRequest, worker_pb2.WarmUpResponse),
    }
    handlers: dict[str, Any] = {
        name: unary(handler, request.FromString, response.SerializeToString)
        for name, (handler, request, response) in methods.items()
    }
    handlers["Attach"] = grpc.stream_stream_rpc_method_handler(service.attach)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))


def to_model_info(facts: ModelFacts, *, takes_pictures: bool = False) -> types_pb2.ModelInfo:
    """Converts the facts of the served model to protobuf."""
    return types_pb2.ModelInfo(
        model=facts.name,
        architecture=facts.architecture,
        vocab_size=facts.vocab_size,
        max_model_len=facts.max_model_len,
        eos_token_ids=facts.eos_token_ids,
        config_sha256=facts.config_sha256,
        tokenizer_sha256=facts.tokenizer_sha256,
        dtype=facts.dtype,
        llguidance_version=LLGUIDANCE_VERSION,
        quantization=facts.quantization,
        takes_pictures=takes_pictures,
    )


def to_refusal(refusal: Refusal) -> worker_pb2.Refusal:
    """Converts a refusal to protobuf."""
    return worker_pb2.Refusal(epoch=refusal.epoch, cause=refusal.cause)


def to_decode_time(spent: DecodeTime) -> timing_pb2.DecodeTime:
    """Converts the totals of decode steps to protobuf."""
    return timing_pb2.DecodeTime(
        num_steps=spent.num_steps, busy_us=spent.busy_us, idle_us=spent.idle_us
    )


def to_tier(tier: TierFacts) -> worker_pb2.KvTier:
    """Converts memory that blocks are kept in to protobuf."""
    return worker_pb2.KvTier(
        name=tier.name, num_blocks=tier.num_blocks, bytes_per_block=tier.bytes_per_block
    )


def to_description(description: Description) -> worker_pb2.WorkerDescription:
    """Converts a worker's description to protobuf."""
    adapters = description.adapters
    return worker_pb2.WorkerDescription(
        model=to_model_info(description.model, takes_pictures=description.encodes_pictures),
        incarnation=description.incarnation,
        num_blocks=description.num_blocks,
        block_size=description.block_size,
        max_num_seqs=description.max_num_seqs,
        max_num_batched_tokens=description.max_num_batched_tokens,
        rank=description.rank,
        world_size=description.world_size,
        all_reduce=description.all_reduce,
        rank_addresses=description.rank_addresses,
        device=description.device,
        kv_dtype=description.kv_dtype,
        kv_layout=description.kv_layout,
        attention_backend=description.attention_backend,
        attention_timings=[
            worker_pb2.AttentionTiming(
                kind=timing.kind, shape=timing.shape, backend=timing.backend, us=timing.us
            )
            for timing in description.attention_timings
        ],
        gemm_timings=_gemm_timings(description),
        graph_batch_sizes=description.graph_batch_sizes,
        num_host_blocks=description.num_host_blocks,
        sends_heartbeats=True,
        max_granted_steps=codec.MAX_GRANTED_STEPS,
        has_state_hashes=True,
        prepares_grammars=True,
        encodes_pictures=description.encodes_pictures,
        keeps_pictures_whole=description.keeps_pictures_whole,
        verifies_drafts=description.verifies_drafts,
        has_states=description.has_states,
        num_state_snapshots=description.num_state_snapshots,
        draft_model=_to_draft_model(description.draft_model),
        protocol_minor=STEP_MINOR,
        tiers=[to_tier(tier) for tier in description.tiers],
        kv_layout_hash=description.kv_layout_hash,
        transports=_to_transports(description),
        kv_groups=[_to_kv_group(group) for group in description.kv_groups],
        max_adapters=0 if adapters is None else adapters.limits.max_loras,
        adapters=[]
        if adapters is None
        else [types_pb2.Adapter(**one.fields()) for one in adapters.names.sources],
        rehearsed_steps=_rehearsed_steps(description),
    )


def _rehearsed_steps(description: Description) -> list[timing_pb2.RehearsedStep]:
    return [
        timing_pb2.RehearsedStep(num_tokens=num_tokens, seconds=seconds)
        for num_tokens, seconds in description.rehearsed_s.items()
    ]


def _to_draft_model(facts: ModelFacts | None) -> types_pb2.ModelInfo | None:
    return None if facts is None else to_model_info(facts)


def _to_transports(description: Description) -> list[worker_pb2.KvTransport]:
    handles = description.kv_handles.items()
    return [worker_pb2.KvTransport(name=name, handle=handle) for name, handle in handles]


def _to_kv_group(group: LayerGroup) -> worker_pb2.KvGroup:
    return worker_pb2.KvGroup(
        block_size=group.block_size,
        window=group.window or 0,
        kind=worker_pb2.KV_GROUP_KIND_KEYS_AND_VALUES,
    )


def _gemm_timings(description: Description) -> list[timing_pb2.GemmTiming]:
    return [
        timing_pb2.GemmTiming(
            num_rows=shape.rows,
            num_outputs=shape.kind.n,
            num_inputs=shape.kind.k,
            adds=shape.kind.adds,
            torch_us=choice.torch_us,
            us=choice.us,
        )
        for shape, choice in description.gemm_choices.items()
    ]


def _hello(check: SealCheck, frame: bytes) -> codec.Hello:
    """The first frame of a stream. Raises FrameLost and BadStep."""
    try:
        check.check(frame)
    except BadFrame as error:
        raise FrameLost(str(error)) from error
    return codec.decode_hello(frame)


def _answer(context: grpc.ServicerContext, work: Callable[[], T]) -> T:
    try:
        return work()
    except Exception as error:
        _abort(context, error)


def _abort(context: grpc.ServicerContext, error: Exception) -> NoReturn:
    for kind, status in STATUSES:
        if isinstance(error, kind):
            context.abort(status, str(error))
    log.error("internal error", exc_info=error)
    context.set_trailing_metadata(OWN_END)
    context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")
