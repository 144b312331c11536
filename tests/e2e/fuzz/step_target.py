"""Sends step frames to a worker: valid ones, changed at random, and handshakes out of order.

A case is a whole stream: frames, each after its length. An epoch of 1 stands for the next one.
"""

import asyncio
import random
import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from pagewire.v1 import worker_pb2
from tests.e2e.fuzz.case import Case, CaseVerdict
from tests.e2e.fuzz.json_bodies import change_bytes
from tests.e2e.fuzz.proto_messages import mutate
from wire.columns import pack

PATIENCE_S = 60.0
PROTOCOL_VERSION = 2
NEXT_EPOCH = 1
MAX_EPOCH_STEP = 3
_PATH = "/pagewire.v1.WorkerService"
_FIELD = re.compile(r"^[a-z_]+[\w\[\].]*:|step_id|epoch|protocol_version")
_LENGTH = struct.Struct("<I")


class StepTarget:
    """The step stream of one worker, one stream at a time."""

    name = "steps"

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self.num_frames = 0

    def draw(self, rng: random.Random) -> Case:
        """A stream with some frames changed."""
        frames = [one.SerializeToString() for one in _stream(rng)]
        if rng.random() < 0.1:
            frames[rng.randrange(len(frames))] = rng.randbytes(rng.choice((0, 1, 8, 40)))
        if rng.random() < 0.1:
            at = rng.randrange(len(frames))
            frames[at] = change_bytes(frames[at], rng)
        if rng.random() < 0.1:
            rng.shuffle(frames)
        return Case(self.name, "Attach", b"".join(_LENGTH.pack(len(one)) + one for one in frames))

    async def run(self, case: Case) -> CaseVerdict:
        """Sends the frames, reads all answers and judges the status."""
        # Not asyncio: there a write after the worker's refusal replaces the refusal's status.
        return await asyncio.to_thread(self._run, case)

    def _run(self, case: Case) -> CaseVerdict:
        try:
            describe: Any = self._channel.unary_unary(f"{_PATH}/Describe")
            answer = describe(b"", timeout=PATIENCE_S, wait_for_ready=True)
            epoch = worker_pb2.DescribeResponse.FromString(answer).epoch
            frames = [_with_epoch(frame, epoch) for frame in _split(case.payload)]
            self.num_frames += len(frames)
            error = ""
            attach: Any = self._channel.stream_stream(f"{_PATH}/Attach")
            for answer in attach(iter(frames), timeout=PATIENCE_S):
                error = worker_pb2.AttachResponse.FromString(answer).output.error or error
        except grpc.RpcError as ended:
            return _judge(ended.code(), ended.details() or "")
        return CaseVerdict("OK, a step failed" if error else "OK")

    async def close(self) -> None:
        """Closes the channel."""
        self._channel.close()


def _with_epoch(frame: bytes, epoch: int) -> bytes:
    with suppress(DecodeError):
        message = worker_pb2.AttachRequest.FromString(frame)
        if message.WhichOneof("frame") == "hello":
            if message.hello.epoch == NEXT_EPOCH:
                message.hello.epoch = epoch + 1
            # A very high one would shut out every later stream.
            message.hello.epoch = min(message.hello.epoch, epoch + MAX_EPOCH_STEP)
            return message.SerializeToString()
    return frame


def _judge(code: grpc.StatusCode, details: str) -> CaseVerdict:
    if code is grpc.StatusCode.UNAVAILABLE:
        return CaseVerdict(code.name, f"unavailable: {details[:200]}", was_lost=True)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return CaseVerdict(code.name, "no answer in time", was_lost=True)
    if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
        return CaseVerdict(code.name, f"{code.name}: {details[:300]}")
    if code is grpc.StatusCode.INVALID_ARGUMENT and not _FIELD.search(details):
        return CaseVerdict(code.name, f"names no field: {details[:200]}")
    return CaseVerdict(code.name)


def _stream(rng: random.Random) -> Iterator[worker_pb2.AttachRequest]:
    """A hello and some steps of up to four slots; each is changed now and then."""
    hello = worker_pb2.Hello(protocol_version=PROTOCOL_VERSION, epoch=NEXT_EPOCH, first_step_id=1)
    if rng.random() < 0.08:
        mutate(hello, rng)
    yield worker_pb2.AttachRequest(hello=hello)
    live: dict[int, int] = {}  # slot to its number of tokens
    for step_id in range(1, rng.choice((2, 4, 8, 20))):
        step = worker_pb2.SchedulerOutput(step_id=step_id, reset=step_id == 1)
        _plan(step, live, rng)
        if rng.random() < 0.15:
            for _ in range(rng.choice((1, 1, 2))):
                mutate(step, rng)
        yield worker_pb2.AttachRequest(step=step)
        if rng.random() < 0.03:
            cut = worker_pb2.Cut(first_step_id=step_id, last_step_id=step_id + rng.randrange(3))
            yield worker_pb2.AttachRequest(cut=cut)


def _plan(step: worker_pb2.SchedulerOutput, live: dict[int, int], rng: random.Random) -> None:
    """A step as a scheduler would plan it: frees, enters, decodes. Each slot has four blocks."""
    freed = [slot for slot in live if rng.random() < 0.1]
    for slot in freed:
        del live[slot]
    step.freed_slots = pack(freed)
    counts = dict.fromkeys(live, 1)
    for slot in range(4):
        if slot not in live and slot not in freed and rng.random() < 0.4:
            num_tokens = rng.choice((1, 3, 16, 17, 30))
            step.new_sequences.append(_sequence(slot, num_tokens, rng))
            live[slot], counts[slot] = 0, num_tokens
    for slot, count in counts.items():
        live[slot] += count
    order = list(counts)
    rng.shuffle(order)
    step.slots = pack(order)
    step.num_scheduled = pack([counts[slot] for slot in order])
    step.wants_state = rng.random() < 0.1


def _sequence(slot: int, num_tokens: int, rng: random.Random) -> worker_pb2.NewSequence:
    sampling = worker_pb2.RowSampling(
        top_p=rng.choice((1.0, 0.9)), temperature=rng.choice((0.0, 1.0)), seed=rng.getrandbits(64)
    )
    return worker_pb2.NewSequence(
        slot=slot,
        request_id=f"fuzz-{slot}",
        token_ids=pack([rng.randrange(49_152) for _ in range(num_tokens)]),
        num_prompt_tokens=num_tokens,
        block_ids=pack([1 + 4 * slot + index for index in range(4)]),
        sampling=sampling,
    )


def _split(payload: bytes) -> Iterator[bytes]:
    at = 0
    while at + _LENGTH.size <= len(payload):
        (length,) = _LENGTH.unpack_from(payload, at)
        at += _LENGTH.size
        yield payload[at : at + length]
        at += length
