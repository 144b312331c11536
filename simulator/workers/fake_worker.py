"""A worker on the real wire that answers steps after a modelled time, with generated tokens.

A token is a function of a sequence's seed and position, so that a reader can detect a lost,
repeated or misplaced one.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import grpc
import numpy as np

from pagewire.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from scheduler_svc.core import KvGroup
from scheduler_svc.core.estimate.step_time import StepTime
from simulator.workers.slots import MAX_GRANTED_STEPS, FakeSlots, InconsistentStep, Outcome
from simulator.workers.stream import FrameRefused, WorkerStream, steps_of
from wire.columns import BadColumn, pack
from wire.server import SERVER_OPTIONS, bind
from wire.state_hash import StateHashes
from wire.versions import STEP_MINOR, kv_groups_problem

Context = grpc.aio.ServicerContext[Any, Any]
INSTANT = StepTime()


@dataclass(frozen=True, slots=True)
class FakeModel:
    """The model and limits that the fake worker reports."""

    num_blocks: int = 4096
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 8192
    vocab_size: int = 32000
    eos_token_ids: tuple[int, ...] = ()
    config_sha256: str = ""
    quantization: str = "none"
    num_host_blocks: int = 0
    kv_dtype: str = "float32"
    kv_groups: tuple[KvGroup, ...] = ()  # group 0 first; empty: it alone, without a window
    protocol_minor: int = STEP_MINOR


def describe(model: FakeModel, incarnation: int) -> worker_pb2.WorkerDescription:
    """The description of a fake worker."""
    return worker_pb2.WorkerDescription(
        model=types_pb2.ModelInfo(
            model="fake",
            architecture="FakeForCausalLM",
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            eos_token_ids=model.eos_token_ids,
            config_sha256=model.config_sha256,
            dtype="float32",
            quantization=model.quantization,
        ),
        incarnation=incarnation,
        num_blocks=model.num_blocks,
        block_size=model.block_size,
        max_num_seqs=model.max_num_seqs,
        max_num_batched_tokens=model.max_num_batched_tokens,
        world_size=1,
        device="none",
        kv_dtype=model.kv_dtype,
        attention_backend="none",
        all_reduce="none",
        sends_heartbeats=True,
        max_granted_steps=MAX_GRANTED_STEPS,
        has_state_hashes=True,
        num_host_blocks=model.num_host_blocks,
        kv_groups=[
            worker_pb2.KvGroup(
                block_size=group.block_size,
                window=group.window or 0,
                kind=worker_pb2.KV_GROUP_KIND_KEYS_AND_VALUES,
            )
            for group in model.kv_groups
        ],
        protocol_minor=model.protocol_minor,
    )


def slots_of(model: FakeModel) -> FakeSlots:
    """The empty slots of a fake worker."""
    return FakeSlots(
        model.max_num_seqs,
        model.vocab_size,
        model.kv_groups or (KvGroup(model.block_size),),
        model.max_model_len,
        model.num_host_blocks,
    )


def to_output(step_id: int, outcome: Outcome) -> worker_pb2.ModelRunnerOutput:
    """The answer to a step."""
    output = worker_pb2.ModelRunnerOutput(step_id=step_id, token_ids=pack(outcome.token_ids))
    for prompt_output in outcome.prompt_outputs:
        packed = output.prompt_outputs.add(**prompt_output.pack())
        if prompt_output.logprobs is not None:
            packed.logprobs.CopyFrom(types_pb2.LogprobColumns(**prompt_output.logprobs.pack()))
    if outcome.logprobs is not None:
        output.logprobs.CopyFrom(types_pb2.LogprobColumns(**outcome.logprobs.pack()))
    return output


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Implements Describe and Attach; the life-cycle calls do nothing."""

    def __init__(self, model: FakeModel | None = None, step_time: StepTime | None = None) -> None:
        self.model = model or FakeModel()
        self.step_time = step_time or INSTANT
        self.incarnation = random.getrandbits(63)
        self.epoch = 0
        self.num_steps = 0
        self.last_step_id = 0
        self.phase: worker_pb2.WorkerPhase = worker_pb2.WORKER_PHASE_READY
        self.fail_steps = 0  # number of next steps answered with an error
        self.short_steps = 0  # number of next steps answered with one token too few
        self.hang_steps = 0  # number of next steps never answered, while heartbeats continue
        self.bad_states = 0  # number of next state hashes that are wrong
        self.is_silent = False  # sends nothing at all, like a stopped process
        self.is_draining = False  # was asked to end
        self.tells_holder = True  # False: of a version before standbys
        self.heard_s: float | None = None  # when its scheduler said that it lives
        self._stream: WorkerStream | None = None
        self._slots = slots_of(self.model)
        self._free_at_s = 0.0

    def description(self) -> worker_pb2.WorkerDescription:
        """The description sent in the handshake."""
        return describe(self.model, self.incarnation)

    @property
    def is_attached(self) -> bool:
        """True if a scheduler's stream is open."""
        return self._stream is not None

    def drain(self) -> None:
        """Does what a worker does at SIGTERM: says so, and accepts no further stream."""
        self.is_draining = True
        if self._stream is not None:
            self._stream.say_draining()

    async def Describe(
        self, request: worker_pb2.DescribeRequest, context: Context
    ) -> worker_pb2.DescribeResponse:
        """Phase, epoch and description, and whether a scheduler has the worker."""
        if request.held_epoch and request.held_epoch >= self.epoch:
            self.heard_s = time.monotonic()
        answer = worker_pb2.DescribeResponse(
            phase=self.phase,
            description=self.description(),
            epoch=self.epoch,
            last_step_id=self.last_step_id,
            num_live_slots=self._slots.num_live,
        )
        if self.tells_holder:
            answer.is_attached = self.is_attached
            if self.heard_s is not None:
                answer.unheard_ms = round(1e3 * (time.monotonic() - self.heard_s))
        return answer

    async def Attach(
        self, request_iterator: AsyncIterator[worker_pb2.AttachRequest], context: Context
    ) -> AsyncIterator[worker_pb2.AttachResponse]:
        """Answers steps in order, one at a time, as a device would."""
        hello = (await anext(request_iterator)).hello
        if hello.epoch <= self.epoch:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"epoch {hello.epoch} is not above {self.epoch}",
            )
        windows = [group.window or 0 for group in self.model.kv_groups]
        if problem := kv_groups_problem(hello.protocol_minor, windows):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, problem)
        if self.is_draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the worker is shutting down")
        self.epoch, self.heard_s = hello.epoch, None
        self.last_step_id = hello.first_step_id - 1
        self._slots = slots_of(self.model)
        yield worker_pb2.AttachResponse(description=self.description())
        self._stream = stream = WorkerStream(hello)
        tasks = [
            asyncio.create_task(stream.read(request_iterator)),
            asyncio.create_task(self._run(stream)),
        ]
        try:
            while (answer := await self._next_answer(stream)) is not None:
                if isinstance(answer, FrameRefused):
                    await context.abort(grpc.StatusCode[answer.status], str(answer))
                yield answer
        finally:
            if self._stream is stream:
                self._stream = None
            for task in tasks:
                task.cancel()

    async def _next_answer(
        self, stream: WorkerStream
    ) -> worker_pb2.AttachResponse | FrameRefused | None:
        """The next answer to send, or a heartbeat if there was none for an interval."""
        while True:
            try:
                async with asyncio.timeout(stream.heartbeat_interval_s):
                    answer = await stream.answers.get()
            except TimeoutError:
                answer = worker_pb2.AttachResponse(heartbeat=stream.beat)
            else:
                if isinstance(answer, worker_pb2.AttachResponse) and answer.HasField("heartbeat"):
                    answer.heartbeat.CopyFrom(stream.beat)
                else:
                    stream.beat.num_frames_sent += 1
            if stream.epoch != self.epoch:
                return FrameRefused("ABORTED", f"epoch {self.epoch} took over")
            while self.is_silent:
                await asyncio.sleep(0.01)
            return answer

    async def _run(self, stream: WorkerStream) -> None:
        """Computes frame after frame, and each step of a grant."""
        try:
            while (frame := await stream.next_frame()) is not None:
                for step in steps_of(frame):
                    if stream.epoch != self.epoch:
                        raise FrameRefused("ABORTED", f"epoch {self.epoch} took over")
                    if not stream.begin(step.step_id):
                        self._skip_rest(frame, step)
                        break
                    output = await self._answer(step)
                    stream.answers.put_nowait(worker_pb2.AttachResponse(output=output))
            stream.answers.put_nowait(None)
        except FrameRefused as refused:
            stream.answers.put_nowait(refused)

    def _skip_rest(
        self, frame: worker_pb2.SchedulerOutput, step: worker_pb2.SchedulerOutput
    ) -> None:
        """Skips the remaining steps of a frame; the frame's changes apply."""
        if not frame.granted_steps:
            raise FrameRefused("INVALID_ARGUMENT", f"cut: step {step.step_id} was not granted")
        self.last_step_id = frame.step_id + frame.granted_steps - 1
        self._slots.skip(frame if step is frame else None)

    async def _answer(self, step: worker_pb2.SchedulerOutput) -> worker_pb2.ModelRunnerOutput:
        if step.step_id != self.last_step_id + 1:
            message = f"step {step.step_id} does not follow {self.last_step_id}"
            raise FrameRefused("ABORTED", message)
        self.last_step_id = step.step_id
        self.num_steps += 1
        if self.hang_steps:
            self.hang_steps -= 1
            await asyncio.Event().wait()
        if self.fail_steps:
            self.fail_steps -= 1
            return worker_pb2.ModelRunnerOutput(step_id=step.step_id, error="planned failure")
        try:
            outcome = self._slots.apply(step)
        except (InconsistentStep, BadColumn, IndexError) as error:
            raise FrameRefused("INVALID_ARGUMENT", str(error)) from error
        num_tokens = outcome.num_computed_tokens
        await self._compute(self.step_time.of(num_tokens, self._slots.context_tokens))
        token_ids = outcome.token_ids
        if self.short_steps:
            self.short_steps -= 1
            token_ids = token_ids[:-1]
        output = to_output(step.step_id, replace(outcome, token_ids=token_ids))
        if step.wants_state:
            output.state.CopyFrom(worker_pb2.StateHashes(**self._state().pack()))
        return output

    def _state(self) -> StateHashes:
        state = self._slots.state()
        if self.bad_states and len(state.hashes):
            self.bad_states -= 1
            return StateHashes(state.slots, state.hashes ^ np.uint64(1))
        return state

    async def _compute(self, duration_s: float) -> None:
        """Occupies the device: a step begins when the previous one ended, however late it came."""
        self._free_at_s = max(self._free_at_s, time.perf_counter()) + duration_s
        left_s = self._free_at_s - time.perf_counter()
        if left_s > 0:
            await asyncio.sleep(left_s)


async def start(worker: FakeWorker, address: str) -> tuple[grpc.aio.Server, int]:
    """Serves a fake worker; returns the server and its port."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
    port = bind(server, address, "the fake worker")
    await server.start()
    return server, port
