"""Faults that tests order by name: a frame lost, an answer cut short, a step that never ends.

Nothing here does anything unless `--failpoint NAME@COUNT` asked for it. Each fires once, at the
COUNTth frame, answer or step since the process started, or the first after it that it fits; what
then happens must be noticed and recovered by the ordinary path.
"""

import logging
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from pagewire.v1 import worker_pb2
from rpc.columns import INT32

log = logging.getLogger(__name__)

DEFAULT_STALL_S = 30.0


class Fault(Enum):
    """What can be ordered."""

    LOSE_STEP = "lose-step"  # a frame from the scheduler never arrives
    REPEAT_STEP = "repeat-step"  # it arrives twice
    SWAP_STEPS = "swap-steps"  # it arrives behind the next one
    LOSE_ANSWER = "lose-answer"  # a frame to the scheduler never leaves
    REPEAT_ANSWER = "repeat-answer"
    SWAP_ANSWERS = "swap-answers"
    SHORT_ANSWER = "short-answer"  # the last token is missing
    ERROR_ANSWER = "error-answer"  # the step failed
    BAD_HASH = "bad-hash"  # the state of a slot is not what it should be
    STALL = "stall"  # a step takes SECONDS longer, while the process lives
    EXIT = "exit"  # the process dies, the step computed and not answered
    NONE = ""


_ARRIVING = (Fault.LOSE_STEP, Fault.REPEAT_STEP, Fault.SWAP_STEPS)
_COMPUTING = (Fault.STALL, Fault.EXIT)


@dataclass(frozen=True, slots=True)
class Failpoint:
    """One fault, and when it is due."""

    fault: Fault
    count: int
    seconds: float = 0.0  # of a stall

    @classmethod
    def parse(cls, text: str) -> "Failpoint":
        """Reads NAME@COUNT, or stall@COUNT:SECONDS. Raises ValueError naming what is wrong."""
        name, _, when = text.partition("@")
        known_names = [fault.value for fault in Fault if fault is not Fault.NONE]
        if name not in known_names:
            known = ", ".join(known_names)
            raise ValueError(f"failpoint {name!r} is not one of {known}")
        fault = Fault(name)
        count, has_seconds, seconds = when.partition(":")
        if not count.isdecimal() or not int(count):
            raise ValueError(f"failpoint {text!r} needs a count: {name}@COUNT, from 1 on")
        if has_seconds and fault is not Fault.STALL:
            raise ValueError(f"failpoint {text!r}: only a stall takes seconds")
        duration_s = float(seconds) if has_seconds else DEFAULT_STALL_S * (fault is Fault.STALL)
        return cls(fault, int(count), duration_s)


NOTHING = Failpoint(Fault.NONE, 0)


@dataclass(slots=True)
class _Due:
    """The failpoints that count the same thing, and how far it has come."""

    waiting: list[Failpoint]
    count: int = 0

    def next(self) -> None:
        self.count += 1

    def take(self, *faults: Fault) -> Failpoint:
        """One that is due, which it will not be again; NOTHING if there is none."""
        for failpoint in self.waiting:
            if failpoint.count <= self.count and failpoint.fault in faults:
                self.waiting.remove(failpoint)
                log.warning("failpoint %s fires at %d", failpoint.fault.value, self.count)
                return failpoint
        return NOTHING


@dataclass(slots=True)
class Failpoints:
    """All that were ordered for this process."""

    _arriving: _Due
    _leaving: _Due
    _computing: _Due

    @classmethod
    def of(cls, failpoints: tuple[Failpoint, ...]) -> "Failpoints":
        """Sorts them by what they count."""
        arriving = [f for f in failpoints if f.fault in _ARRIVING]
        computing = [f for f in failpoints if f.fault in _COMPUTING]
        leaving = [f for f in failpoints if f not in arriving and f not in computing]
        return cls(_Due(arriving), _Due(leaving), _Due(computing))

    def arriving(self, frames: Iterator[bytes]) -> Iterator[bytes]:
        """The frames behind the hello, as they arrive."""
        for frame in frames:
            self._arriving.next()
            match self._arriving.take(*_ARRIVING).fault:
                case Fault.LOSE_STEP:
                    continue
                case Fault.REPEAT_STEP:
                    yield frame
                case Fault.SWAP_STEPS:
                    yield from _first(frames)
            yield frame

    def leaving(self, frames: Iterator[bytes]) -> Iterator[bytes]:
        """What goes out in place of one stream's frames; only outputs are touched."""
        held: bytes | None = None
        for frame in frames:
            response = worker_pb2.AttachResponse.FromString(frame)
            if not response.HasField("output"):
                yield frame
                continue
            self._leaving.next()
            match self._leaving.take(*_faults_that_fit(response.output)).fault:
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
                    yield response.SerializeToString()
            if held is not None:
                yield held
                held = None

    def before_step(self) -> None:
        """On the compute thread: a step is about to be computed."""
        self._computing.next()
        if seconds := self._computing.take(Fault.STALL).seconds:
            time.sleep(seconds)

    def after_step(self) -> None:
        """It is computed, or launched, and nothing has been answered."""
        if self._computing.take(Fault.EXIT).fault is Fault.EXIT:
            os.kill(os.getpid(), signal.SIGKILL)


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
