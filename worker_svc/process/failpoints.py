"""Fault injection for tests: lost frames, incomplete answers, steps that never end.

Without `--failpoint NAME@COUNT` this module has no effect. Each stream injects at most one fault,
in the order of the options: at the stream's COUNTth frame, answer or step, or at the first one
after it that the fault applies to. The service must detect the fault and recover as from a real
one. A slow device is no such fault: it is slow on every stream.
"""

import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from pagewire.v1 import worker_pb2
from wire.columns import INT32
from wire.sealed import sealed_at

log = logging.getLogger(__name__)

DEFAULT_STALL_S = 30.0
POISONOUS = "poison"  # beginning of the ids that the fault of this name is for


class Fault(Enum):
    """The available faults."""

    LOSE_STEP = "lose-step"  # a frame from the scheduler never arrives
    REPEAT_STEP = "repeat-step"  # it arrives twice
    SWAP_STEPS = "swap-steps"  # it arrives after the next one
    LOSE_ANSWER = "lose-answer"  # a frame to the scheduler never leaves
    REPEAT_ANSWER = "repeat-answer"
    SWAP_ANSWERS = "swap-answers"
    SHORT_ANSWER = "short-answer"  # the last token is missing
    ERROR_ANSWER = "error-answer"  # the step failed
    BAD_HASH = "bad-hash"  # the state hash of a slot is wrong
    STALL = "stall"  # a step takes SECONDS longer
    SLOW = "slow"  # each step of each stream does, from the COUNTth on
    LOSE_DEVICE = "lose-device"  # a kernel fails and breaks the CUDA context
    HANG_DEVICE = "hang-device"  # a kernel never ends
    EXIT = "exit"  # the process exits after a step, before its answer
    POISON = "poison"  # it exits at the COUNTth step of a request whose id begins with "poison"
    NONE = ""


FAULTS_OF_CUDA = (Fault.LOSE_DEVICE, Fault.HANG_DEVICE)


@dataclass(frozen=True, slots=True)
class Failpoint:
    """One fault and the count at which it is injected."""

    fault: Fault
    count: int
    seconds: float = 0.0  # that a step takes longer

    @classmethod
    def parse(cls, text: str) -> "Failpoint":
        """Parses NAME@COUNT, stall@COUNT:SECONDS or slow@COUNT:SECONDS.

        Raises ValueError, naming the problem.
        """
        name, _, when = text.partition("@")
        known_names = [fault.value for fault in Fault if fault is not Fault.NONE]
        if name not in known_names:
            known = ", ".join(known_names)
            raise ValueError(f"failpoint {name!r} is not one of {known}")
        fault = Fault(name)
        count, has_seconds, seconds = when.partition(":")
        if not count.isdecimal() or not int(count):
            raise ValueError(f"failpoint {text!r} needs a count: {name}@COUNT, from 1 on")
        if has_seconds and fault not in (Fault.STALL, Fault.SLOW):
            raise ValueError(f"failpoint {text!r}: only stall and slow take seconds")
        if fault is Fault.SLOW and not has_seconds:
            raise ValueError(f"failpoint {text!r} needs seconds: slow@COUNT:SECONDS")
        duration_s = float(seconds) if has_seconds else DEFAULT_STALL_S * (fault is Fault.STALL)
        return cls(fault, int(count), duration_s)


NOTHING = Failpoint(Fault.NONE, 0)


class Failpoints:
    """The faults of this process that are still to be injected, in order."""

    def __init__(self, failpoints: Sequence[Failpoint]) -> None:
        self._waiting = deque(one for one in failpoints if one.fault is not Fault.SLOW)
        self._slow = [one for one in failpoints if one.fault is Fault.SLOW]

    def next_stream(self) -> "StreamFaults":
        """Returns the fault injector for a new stream."""
        return StreamFaults(self._waiting, self._slow)


class StreamFaults:
    """Counts the frames and steps of one stream and injects at most one fault."""

    def __init__(self, waiting: deque[Failpoint], slow: Sequence[Failpoint]) -> None:
        self._waiting = waiting
        self._slow = slow
        self._has_fired = False
        self._num_arrived = 0
        self._num_left = 0
        self._num_computed = 0
        self._num_poisoned = 0  # steps that computed a request named so

    def _fire(self, count: int, *faults: Fault) -> Failpoint:
        """Returns the next failpoint if it is due and one of these faults; else NOTHING."""
        if self._has_fired or not self._waiting:
            return NOTHING
        failpoint = self._waiting[0]
        if failpoint.count > count or failpoint.fault not in faults:
            return NOTHING
        self._has_fired = True
        log.warning("failpoint %s fires at %d", failpoint.fault.value, count)
        return self._waiting.popleft()

    def arriving(self, frames: Iterator[bytes]) -> Iterator[bytes]:
        """Yields the received frames after the hello, with a fault of the receiving side."""
        faults = (Fault.LOSE_STEP, Fault.REPEAT_STEP, Fault.SWAP_STEPS)
        for frame in frames:
            self._num_arrived += 1
            match self._fire(self._num_arrived, *faults).fault:
                case Fault.LOSE_STEP:
                    continue
                case Fault.REPEAT_STEP:
                    yield frame
                case Fault.SWAP_STEPS:
                    yield from _first(frames)
            yield frame

    def leaving(self, frames: Iterator[bytes]) -> Iterator[bytes]:
        """Yields the frames to send, with a fault in a step's output if one is due."""
        held: bytes | None = None
        for frame in frames:
            response = worker_pb2.AttachResponse.FromString(frame)
            if not response.HasField("output"):
                yield frame
                continue
            self._num_left += 1
            match self._fire(self._num_left, *_faults_that_fit(response.output)).fault:
                case Fault.NONE:
                    yield frame
                case Fault.LOSE_ANSWER:
                    continue
                case Fault.REPEAT_ANSWER:
                    yield from (frame, frame)
                case Fault.SWAP_ANSWERS:
                    held = frame
                    continue
                case fault:
                    _spoil(response.output, fault)
                    place = response.sequence
                    response.ClearField("sequence")
                    response.ClearField("checksum")
                    yield sealed_at(place, response.SerializeToString())
            if held is not None:
                yield held
                held = None

    def before_step(self) -> None:
        """Injects a fault of the device; called on the compute thread before a step."""
        self._num_computed += 1
        failpoint = self._fire(self._num_computed, Fault.STALL, *FAULTS_OF_CUDA)
        if failpoint.fault in FAULTS_OF_CUDA:
            _harm_device(failpoint.fault)
        late_s = failpoint.seconds
        late_s += sum(one.seconds for one in self._slow if one.count <= self._num_computed)
        if late_s:
            time.sleep(late_s)

    def after_step(self, request_ids: Callable[[], Iterable[str]] = tuple) -> None:
        """Injects an exit; called after a step is computed or launched, before its answer.

        `request_ids` names those of the step, where it is computed already: on CPU.
        """
        if self._waiting and self._waiting[0].fault is Fault.POISON:
            self._num_poisoned += any(one.startswith(POISONOUS) for one in request_ids())
            if self._fire(self._num_poisoned, Fault.POISON).fault is Fault.POISON:
                os.kill(os.getpid(), signal.SIGKILL)
        if self._fire(self._num_computed, Fault.EXIT).fault is Fault.EXIT:
            os.kill(os.getpid(), signal.SIGKILL)


def _harm_device(fault: Fault) -> None:
    import torch  # noqa: PLC0415 - parsing options must not load torch

    if fault is Fault.HANG_DEVICE:
        torch.cuda._sleep(2**62)  # type: ignore[no-untyped-call]  # cycles: a century
    else:  # LOSE_DEVICE: an assertion fails in a kernel
        outside = torch.ones(1, dtype=torch.int64, device="cuda")
        torch.zeros(1, device="cuda").index_select(0, outside)


def _first(frames: Iterator[bytes]) -> Iterator[bytes]:
    for frame in frames:
        yield frame
        return


def _spoil(output: worker_pb2.ModelRunnerOutput, fault: Fault) -> None:
    if fault is Fault.SHORT_ANSWER:
        output.token_ids = output.token_ids[: -INT32.itemsize]
    elif fault is Fault.BAD_HASH:
        hashes = output.state.hashes
        output.state.hashes = bytes([hashes[0] ^ 1]) + hashes[1:]
    else:
        failed = worker_pb2.ModelRunnerOutput(step_id=output.step_id, error="failpoint")
        output.CopyFrom(failed)


def _faults_that_fit(output: worker_pb2.ModelRunnerOutput) -> list[Fault]:
    faults = [Fault.LOSE_ANSWER, Fault.REPEAT_ANSWER, Fault.SWAP_ANSWERS, Fault.ERROR_ANSWER]
    if output.token_ids:
        faults.append(Fault.SHORT_ANSWER)
    if output.state.hashes:
        faults.append(Fault.BAD_HASH)
    return faults
