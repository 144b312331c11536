"""The step stream to one worker group: attach, send steps, receive outputs.

A link lives as long as its stream. Every failure of it raises LinkLost; the engine then recovers
and makes a new link.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError

from pagewire.v1 import debug_pb2, debug_pb2_grpc, worker_pb2, worker_pb2_grpc
from scheduler_svc.worker.watch import Watch, silence_patience
from wire.adapters import AdapterSource
from wire.deaths import PeerLoss, is_death, loss_of
from wire.identity.peers import OpenPeer, open_plain
from wire.patience import Patience
from wire.sealed import BadFrame, SealCheck, Sealer, sealed_call
from wire.server import CHANNEL_OPTIONS
from wire.versions import STEP_MAJOR, STEP_MINOR

_ATTACH = "/pagewire.v1.WorkerService/Attach"
_DESCRIBE_TIMEOUT_S = 2.0
_LONGEST_DESCRIBE_S = 30.0  # of a worker that did not answer in time before
_ATTACH_TIMEOUT_S = 10.0
_ADAPTER_TIMEOUT_S = 300.0  # to read one from a slow disk
_LONGEST_ATTACH_S = 60.0
_BEATS_PER_TIMEOUT = 6  # heartbeats that may be lost or late before the timeout
_PHASE_NAMES = {
    value: name.removeprefix("WORKER_PHASE_").lower().replace("_", " ")
    for name, value in worker_pb2.WorkerPhase.items()
}


Answer = worker_pb2.ModelRunnerOutput | worker_pb2.Skipped
Prepared = worker_pb2.GrammarPrepared | worker_pb2.AdapterPrepared


class LinkLost(Exception):
    """Raised when the stream to the worker ended or cannot be opened; the message says why.

    `loss` says what that tells of the worker; where it is unclear, its next incarnation does.
    `is_unreached` says that no process of it answered at all.
    """

    def __init__(
        self,
        message: str,
        loss: PeerLoss = PeerLoss.HARMLESS,
        *,
        is_unreached: bool = False,
    ) -> None:
        super().__init__(message)
        self.loss = loss
        self.is_unreached = is_unreached


class AttachRefused(LinkLost):
    """Raised when the worker did not accept the epoch."""


class FencedOut(Exception):
    """Raised when another scheduler with a higher epoch has taken the worker."""


@dataclass(frozen=True, slots=True)
class Attached:
    """The worker's description and limits from the handshake."""

    description: worker_pb2.WorkerDescription
    epoch: int


class WorkerLink:
    """One attached stream. One task may call `receive`, and one `send`."""

    def __init__(
        self,
        stream: grpc.aio.StreamStreamCall,  # type: ignore[type-arg]
        attached: Attached,
        patience: Patience,
        check: SealCheck,
    ) -> None:
        beats = attached.description.sends_heartbeats
        self.attached = attached
        self.watch = Watch(patience if beats else None)
        # Receives answers about grammars and adapters, which may come at any time.
        self.on_prepared: Callable[[Prepared], None] = lambda _: None
        # Receives the ends of transfers, which may come at any time, too.
        self.on_transfer_done: Callable[[worker_pb2.TransferDone], None] = lambda _: None
        # Receives what a tier holds that is older than its process, in any number of messages.
        self.on_tier_contents: Callable[[worker_pb2.TierContents], None] = lambda _: None
        # For how long a transfer that was cancelled is not answered, after so many seconds more.
        self.s_since_cancel: Callable[[float], float] = lambda _: 0.0
        # Called when the worker says that it was asked to end; perhaps more than once.
        self.on_draining: Callable[[], None] = lambda: None
        self._stream = stream
        self._check = check
        self._reading: asyncio.Task[Answer] | None = None
        self._why_lost = ""
        self._loss = PeerLoss.HARMLESS

    @property
    def loss_by_answer(self) -> PeerLoss:
        """The loss that a misfit answer tells of: before it, no sealed frame was lost."""
        return PeerLoss.OWN_END if self._check.is_sealed else PeerLoss.HARMLESS

    async def send(self, step: worker_pb2.SchedulerOutput) -> None:
        """Sends a step."""
        await self._write(worker_pb2.AttachRequest(step=step))

    async def cut(self, first_step_id: int, last_step_id: int) -> None:
        """Asks the worker to skip these granted steps; it answers with a Skipped."""
        cut = worker_pb2.Cut(first_step_id=first_step_id, last_step_id=last_step_id)
        await self._write(worker_pb2.AttachRequest(cut=cut))

    async def prepare(self, frames: Iterable[worker_pb2.AttachRequest]) -> None:
        """Asks the worker to prepare what sequences require; it answers each to `on_prepared`."""
        for frame in frames:
            await self._write(frame)

    async def transfer(self, frames: Iterable[worker_pb2.AttachRequest]) -> None:
        """Asks for transfers, or for their end; the worker answers each to `on_transfer_done`."""
        for frame in frames:
            await self._write(frame)

    async def _write(self, frame: worker_pb2.AttachRequest) -> None:
        try:
            await self._stream.write(frame)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise self._lost(error) from error
        except asyncio.CancelledError as error:
            self._raise_if_lost(error)
            raise
        self.watch.frame_sent()

    def reading(self) -> asyncio.Task[Answer]:
        """The task that waits for the next answer, to be awaited together with other events."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._read())
        return self._reading

    async def receive(self) -> Answer:
        """The next output, or the answer to a cut. Raises LinkLost; cancelling loses the link."""
        reading, self._reading = self._reading, None
        return await (reading or self._read())

    async def _read(self) -> Answer:
        while True:
            try:
                frame = await self._stream.read()
            except grpc.aio.AioRpcError as error:
                raise self._lost(error) from error
            except asyncio.CancelledError as error:
                self._raise_if_lost(error)
                raise
            if not isinstance(frame, bytes):  # end of stream
                details = self._why_lost or await self._stream.details()
                raise LinkLost(f"the worker closed the stream: {details}", self._loss)
            response = _parsed(self._check, frame)
            if not response.HasField("heartbeat"):
                self.watch.output_came()
                if response.HasField("grammar_prepared"):
                    self.on_prepared(response.grammar_prepared)
                    continue
                if response.HasField("adapter_prepared"):
                    self.on_prepared(response.adapter_prepared)
                    continue
                if response.HasField("transfer_done"):
                    self.on_transfer_done(response.transfer_done)
                    continue
                if response.HasField("tier_contents"):
                    self.on_tier_contents(response.tier_contents)
                    continue
                return response.skipped if response.HasField("skipped") else response.output
            if why := self.watch.heartbeat_came(response.heartbeat):
                raise LinkLost(why)
            if response.heartbeat.is_draining:
                self.on_draining()

    def lose(self, why: str, loss: PeerLoss = PeerLoss.HARMLESS) -> None:
        """Closes the stream; a pending `receive` raises LinkLost with this reason."""
        if not self._why_lost:
            self._why_lost, self._loss = why, loss
        self._stream.cancel()

    def _lost(self, error: BaseException) -> LinkLost:
        if self._why_lost:
            return LinkLost(self._why_lost, self._loss)
        if isinstance(error, grpc.aio.AioRpcError):
            return LinkLost(_reason(error), loss_of(error))
        return LinkLost(_reason(error), PeerLoss.UNCLEAR)

    def _raise_if_lost(self, error: asyncio.CancelledError) -> None:
        # gRPC reports a cancelled stream as if the task that reads it had been cancelled.
        task = asyncio.current_task()
        if self._why_lost and task is not None and not task.cancelling():
            raise self._lost(error) from error

    async def close(self) -> None:
        """Ends the stream; the worker keeps its weights and waits for the next."""
        self._stream.cancel()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)


OpenChannel = Callable[..., grpc.aio.Channel]  # as open_channel; the address alone where it is all


def open_channel(
    address: str, server_name: str = "", opener: OpenPeer = open_plain
) -> grpc.aio.Channel:
    """A channel that reconnects soon after the worker returns.

    With TLS the certificate must be for `server_name`, if given, instead of the address.
    """
    options: list[tuple[str, int | str]] = [*CHANNEL_OPTIONS]
    options.append(("grpc.initial_reconnect_backoff_ms", 200))
    options.append(("grpc.max_reconnect_backoff_ms", 1_000))
    if server_name:
        options.append(("grpc.ssl_target_name_override", server_name))
    return opener(address, options)


class WorkerClient:
    """Attaches to the worker at one address."""

    def __init__(
        self, address: str, heartbeat_timeout_s: float, open_channel: OpenChannel = open_channel
    ) -> None:
        self.address = address
        self._open_channel = open_channel
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self.patience = silence_patience(heartbeat_timeout_s)  # with the worker, over its links
        self._describing = Patience(_DESCRIBE_TIMEOUT_S, _LONGEST_DESCRIBE_S)
        self._attaching = Patience(_ATTACH_TIMEOUT_S, _LONGEST_ATTACH_S)
        self._channel: grpc.aio.Channel | None = None
        self.open()

    def open(self) -> None:
        """Opens the channel after `close`; no effect on one that is open."""
        if self._channel is None:
            self._channel = self._open_channel(self.address)
            self._stub = worker_pb2_grpc.WorkerServiceStub(self._channel)

    async def epoch(self) -> int:
        """The highest epoch that the worker has seen. Raises LinkLost if it is not ready."""
        return int((await self.describe()).epoch)

    async def describe(self, held_epoch: int = 0) -> worker_pb2.DescribeResponse:
        """The worker, and the highest epoch it has seen. Raises LinkLost if it is not ready.

        With an epoch the worker hears that the scheduler which holds it under that one lives.
        """
        if self._channel is None:
            raise LinkLost(f"worker {self.address} is not connected")
        try:
            answer: worker_pb2.DescribeResponse = await self._stub.Describe(
                worker_pb2.DescribeRequest(held_epoch=held_epoch), timeout=self._describing.limit_s
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                self._describing.gave_up()
            raise LinkLost(
                f"worker {self.address} does not answer: {_reason(error)}",
                is_unreached=error.code() is grpc.StatusCode.UNAVAILABLE and not is_death(error),
            ) from error
        if answer.phase != worker_pb2.WORKER_PHASE_READY:
            state = answer.failure or _PHASE_NAMES[answer.phase]
            # One that was ready stays so: this is another process.
            raise LinkLost(f"worker {self.address} is not ready: {state}", PeerLoss.DEATH)
        return answer

    async def attach(self, epoch: int, first_step_id: int) -> WorkerLink:
        """Opens the step stream under `epoch`. Raises LinkLost."""
        hello = worker_pb2.Hello(
            protocol_version=STEP_MAJOR,
            epoch=epoch,
            first_step_id=first_step_id,
            protocol_minor=STEP_MINOR,
            heartbeat_interval_ms=round(self._heartbeat_timeout_s / _BEATS_PER_TIMEOUT * 1e3),
        )
        if self._channel is None:
            raise LinkLost(f"worker {self.address} is not connected")
        check, stream = SealCheck(), sealed_call(self._channel, _ATTACH, Sealer())
        try:
            await stream.write(worker_pb2.AttachRequest(hello=hello))
            async with asyncio.timeout(self._attaching.limit_s):
                frame = await stream.read()
        except (grpc.aio.AioRpcError, TimeoutError, asyncio.InvalidStateError) as error:
            stream.cancel()
            message = f"worker {self.address}: {_reason(error)}"
            if isinstance(error, TimeoutError):
                self._attaching.gave_up()
            if (
                isinstance(error, grpc.aio.AioRpcError)
                and error.code() is grpc.StatusCode.FAILED_PRECONDITION
            ):
                raise AttachRefused(message) from error
            raise LinkLost(message) from error
        try:
            first = _parsed(check, frame) if isinstance(frame, bytes) else None
        except LinkLost:
            stream.cancel()
            raise
        if first is None or not first.HasField("description"):
            stream.cancel()
            raise LinkLost(f"worker {self.address} did not describe itself")
        return WorkerLink(stream, Attached(first.description, epoch), self.patience, check)

    async def load_adapter(self, name: str, path: str, replaces: bool) -> AdapterSource:
        """Has the worker read an adapter. Raises grpc.aio.AioRpcError and LinkLost."""
        request = worker_pb2.LoadAdapterRequest(name=name, path=path, replaces=replaces)
        answer = await self._connected().LoadAdapter(request, timeout=_ADAPTER_TIMEOUT_S)
        return AdapterSource.from_message(answer.adapter)

    async def unload_adapter(self, name: str) -> None:
        """Has the worker name an adapter no more. Raises grpc.aio.AioRpcError and LinkLost."""
        request = worker_pb2.UnloadAdapterRequest(name=name)
        await self._connected().UnloadAdapter(request, timeout=_DESCRIBE_TIMEOUT_S)

    def _connected(self) -> "worker_pb2_grpc.WorkerServiceAsyncStub":
        if self._channel is None:
            raise LinkLost(f"worker {self.address} is not connected")
        return self._stub

    async def profile(
        self, request: debug_pb2.ProfileStepsRequest, timeout_s: float
    ) -> AsyncIterator[debug_pb2.ProfileStepsResponse]:
        """The worker's record of its next steps. Raises grpc.aio.AioRpcError and LinkLost."""
        if self._channel is None:
            raise LinkLost(f"worker {self.address} is not connected")
        stub = debug_pb2_grpc.DebugServiceStub(self._channel)
        call = stub.ProfileSteps(request, timeout=timeout_s)
        try:
            async for message in call:
                yield message
        finally:
            call.cancel()

    async def close(self) -> None:
        """Closes the channel."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


def _parsed(check: SealCheck, frame: bytes) -> worker_pb2.AttachResponse:
    """A frame of the worker. Raises LinkLost if it is not the next one, or none at all."""
    try:
        check.check(frame)
        return worker_pb2.AttachResponse.FromString(frame)
    except BadFrame as error:
        raise LinkLost(str(error)) from error
    except DecodeError as error:
        problem = f"{len(frame)} bytes of the worker are no frame"
        raise LinkLost(problem, PeerLoss.OWN_END) from error


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
