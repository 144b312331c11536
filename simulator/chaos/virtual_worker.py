"""A worker process under virtual time: follows the stream's protocol, or breaks it on request.

Its tokens follow from seed and position (`slots.FakeSlots`). It crashes, stops, hangs, slows down
and answers wrongly when requested; a scheduler that handles this loses nothing that its clients can
see.
"""

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field

import grpc

from pagewire.v1 import types_pb2, worker_pb2
from scheduler_svc.core.estimate.step_time import StepTime
from simulator.chaos.virtual_network import Weather, WorkerEnd
from simulator.workers.fake_worker import FakeModel, slots_of
from simulator.workers.slots import MAX_GRANTED_STEPS, FakeSlots, InconsistentStep
from simulator.workers.stream import steps_of
from wire.columns import BadColumn, pack


@dataclass(slots=True)
class Faults:
    """Faults of the next steps; each count decreases with every step."""

    fail: int = 0  # answered with an error
    short: int = 0  # answered with one token too few
    bad_row: int = 0  # one row's logits are not finite
    hang: int = 0  # never answered, while heartbeats continue
    wrong_state: int = 0  # the hash of a slot is wrong


@dataclass(slots=True)
class _Attachment:
    """One scheduler's stream, and the steps received on it."""

    end: WorkerEnd
    hello: worker_pb2.Hello
    slots: FakeSlots
    steps: asyncio.Queue[worker_pb2.SchedulerOutput] = field(default_factory=asyncio.Queue)
    next_step_id: int = 0
    last_begun: int = 0
    left_out: list[range] = field(default_factory=list)
    num_received: int = 0
    num_sent: int = 0


class VirtualWorker:
    """One process at one address, and its restarts."""

    def __init__(
        self, name: str, model: FakeModel, step_time: StepTime, weather: Weather, rng: random.Random
    ) -> None:
        self.name = name
        self.model = model
        self.step_time = step_time
        self.weather = weather
        self.faults = Faults()
        self.slowness = 1.0
        self.bad_rows: list[tuple[int, int]] = []  # (step id, row) of answered bad rows
        self.num_steps = 0
        self._rng = rng
        self._is_up = True
        self._is_running = asyncio.Event()  # cleared while stopped by a signal
        self._is_running.set()
        self._start()

    def _start(self) -> None:
        self._incarnation = self._rng.getrandbits(62)
        self._epoch = 0
        self._attached: _Attachment | None = None
        self._device = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    # --- process events --------------------------------------------------------------------------

    def crash(self, is_noticed: bool = True) -> None:
        """Ends the process; its peers notice at once, or not at all when the host is lost."""
        for task in self._tasks:
            task.cancel()
        if self._attached is not None:
            self._attached.end.reset() if is_noticed else self._attached.end.vanish()
        self._is_up = False

    def restart(self) -> None:
        """Starts a new process at the same address, without state."""
        if not self._is_up:
            self._is_up = True
            self._is_running.set()
            self.faults = Faults()
            self._start()

    def stop(self) -> None:
        """Suspends the process, as SIGSTOP does."""
        self._is_running.clear()

    def go_on(self) -> None:
        """Resumes the process, as SIGCONT does."""
        self._is_running.set()

    def reset_connection(self) -> None:
        """Breaks the stream; the process lives."""
        if self._attached is not None:
            self._attached.end.reset()

    # --- calls -----------------------------------------------------------------------------------

    def describe(self) -> worker_pb2.DescribeResponse | None:
        """The answer to Describe; None while the process does not run."""
        if not self._is_up or not self._is_running.is_set():
            return None
        return worker_pb2.DescribeResponse(
            phase=worker_pb2.WORKER_PHASE_READY,
            description=self._description(),
            epoch=self._epoch,
        )

    def accept(self, end: WorkerEnd) -> bool:
        """Serves a new stream; False while the process is down."""
        if self._is_up:
            self._spawn(self._serve(end))
        return self._is_up

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()  # raises errors of the simulation itself

    def _description(self) -> worker_pb2.WorkerDescription:
        model = self.model
        return worker_pb2.WorkerDescription(
            model=types_pb2.ModelInfo(
                model="fake",
                vocab_size=model.vocab_size,
                max_model_len=model.max_model_len,
                eos_token_ids=model.eos_token_ids,
                config_sha256="simulated",
            ),
            incarnation=self._incarnation,
            num_blocks=model.num_blocks,
            num_host_blocks=model.num_host_blocks,
            block_size=model.block_size,
            max_num_seqs=model.max_num_seqs,
            max_num_batched_tokens=model.max_num_batched_tokens,
            world_size=1,
            sends_heartbeats=True,
            max_granted_steps=MAX_GRANTED_STEPS,
            has_state_hashes=True,
        )

    # --- the step stream -------------------------------------------------------------------------

    async def _serve(self, end: WorkerEnd) -> None:
        first = await end.frames.get()
        await self._is_running.wait()
        if first is None or not first.HasField("hello"):
            end.end(grpc.StatusCode.INVALID_ARGUMENT, "the first frame is not a hello")
            return
        hello = first.hello
        if hello.epoch <= self._epoch:
            end.end(grpc.StatusCode.FAILED_PRECONDITION, f"epoch {hello.epoch} is not higher")
            return
        self._epoch = hello.epoch
        if self._attached is not None:
            self._attached.end.end(grpc.StatusCode.ABORTED, f"epoch {hello.epoch} took over")
        slots = slots_of(self.model)
        attached = self._attached = _Attachment(
            end, hello, slots, next_step_id=hello.first_step_id, last_begun=hello.first_step_id - 1
        )
        async with self._device:  # steps of an older stream are done
            end.send(worker_pb2.AttachResponse(description=self._description()))
        self._spawn(self._beat(attached))
        self._spawn(self._compute(attached))
        await self._read(attached)

    async def _read(self, attached: _Attachment) -> None:
        while (frame := await attached.end.frames.get()) is not None:
            await self._is_running.wait()
            attached.num_received += 1
            if frame.HasField("cut"):
                self._cut(attached, frame.cut)
            else:
                attached.steps.put_nowait(frame.step)

    def _cut(self, attached: _Attachment, cut: worker_pb2.Cut) -> None:
        """Answers a cut at once with the steps that have not begun."""
        first = min(max(cut.first_step_id, attached.last_begun + 1), cut.last_step_id + 1)
        attached.left_out.append(range(first, cut.last_step_id + 1))
        skipped = worker_pb2.Skipped(first_step_id=first, last_step_id=cut.last_step_id)
        self._send(attached, worker_pb2.AttachResponse(skipped=skipped))

    async def _compute(self, attached: _Attachment) -> None:
        while not attached.end.is_over:
            frame = await attached.steps.get()
            if frame.step_id != attached.next_step_id:
                message = f"step_id {frame.step_id}, expected {attached.next_step_id}"
                attached.end.end(grpc.StatusCode.ABORTED, message)
                return
            attached.next_step_id = frame.step_id + max(frame.granted_steps, 1)
            async with self._device:
                try:
                    await self._run(attached, frame)
                except (InconsistentStep, BadColumn, IndexError) as error:
                    attached.end.end(grpc.StatusCode.INVALID_ARGUMENT, str(error))
                    return

    async def _run(self, attached: _Attachment, frame: worker_pb2.SchedulerOutput) -> None:
        for step in steps_of(frame):
            if attached.end.is_over:
                return
            if any(step.step_id in steps for steps in attached.left_out):
                attached.slots.skip(frame if step is frame else None)
                return
            attached.last_begun = step.step_id
            if self.faults.hang:
                self.faults.hang -= 1
                await asyncio.Event().wait()
            output = await self._step(attached, step)
            self._send(attached, worker_pb2.AttachResponse(output=output))

    async def _step(
        self, attached: _Attachment, step: worker_pb2.SchedulerOutput
    ) -> worker_pb2.ModelRunnerOutput:
        self.num_steps += 1
        faults = self.faults
        if faults.fail:
            faults.fail -= 1
            return worker_pb2.ModelRunnerOutput(step_id=step.step_id, error="a planned failure")
        outcome = attached.slots.apply(step)
        context = attached.slots.context_tokens
        await asyncio.sleep(self.slowness * self.step_time.of(outcome.num_computed_tokens, context))
        await self._is_running.wait()
        token_ids = outcome.token_ids
        output = worker_pb2.ModelRunnerOutput(step_id=step.step_id)
        if faults.short and len(token_ids):
            faults.short -= 1
            token_ids = token_ids[:-1]
        elif faults.bad_row and len(token_ids):
            faults.bad_row -= 1
            row = self._rng.randrange(len(token_ids))
            self.bad_rows.append((step.step_id, row))
            output.row_status = bytes(int(i == row) for i in range(len(token_ids)))
        output.token_ids = pack(token_ids)
        if step.wants_state:
            packed = attached.slots.state().pack()
            if faults.wrong_state and packed["hashes"]:
                faults.wrong_state -= 1
                packed["hashes"] = bytes(byte ^ 1 for byte in packed["hashes"])
            output.state.CopyFrom(worker_pb2.StateHashes(**packed))
        return output

    async def _beat(self, attached: _Attachment) -> None:
        interval_s = attached.hello.heartbeat_interval_ms / 1e3
        while interval_s and not attached.end.is_over:
            await asyncio.sleep(interval_s)
            await self._is_running.wait()
            beat = worker_pb2.Heartbeat(
                num_frames_received=attached.num_received, num_frames_sent=attached.num_sent
            )
            attached.end.send(worker_pb2.AttachResponse(heartbeat=beat))

    def _send(self, attached: _Attachment, response: worker_pb2.AttachResponse) -> None:
        attached.num_sent += 1
        attached.end.send(response)
