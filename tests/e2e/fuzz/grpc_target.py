"""Sends messages to the gRPC services, public and token level, and judges the statuses."""

import asyncio
import random
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf.message import Message

from pagewire.v1 import embedding_pb2, inference_pb2, scheduler_pb2, types_pb2
from tests.e2e.fuzz.case import Case, CaseVerdict
from tests.e2e.fuzz.proto_messages import encode, mutate
from wire.columns import pack

LEAVE_S = 3.0  # a call without any answer is left: it may generate for minutes
CUT_S = 0.2
WRONG = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
NAMED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
_SAMPLING = types_pb2.SamplingParams(max_tokens=2, temperature=0.5, seed=3)
_OPTIONS = inference_pb2.GenerationOptions(sampling=_SAMPLING)
_PROMPT = inference_pb2.Prompt(text="Hello")
_TURN = inference_pb2.ChatMessage(role="user", content="Hello")
PUBLIC: dict[str, Message] = {
    "InferenceService/Generate": inference_pb2.GenerateRequest(prompt=_PROMPT, options=_OPTIONS),
    "InferenceService/GenerateStream": inference_pb2.GenerateStreamRequest(
        prompt=_PROMPT, options=_OPTIONS
    ),
    "InferenceService/Chat": inference_pb2.ChatRequest(messages=[_TURN], options=_OPTIONS),
    "InferenceService/ChatStream": inference_pb2.ChatStreamRequest(
        messages=[_TURN], options=_OPTIONS
    ),
    "InferenceService/Tokenize": inference_pb2.TokenizeRequest(text="Hello"),
    "InferenceService/Detokenize": inference_pb2.DetokenizeRequest(token_ids=[5, 6]),
    "InferenceService/ListModels": inference_pb2.ListModelsRequest(),
    "EmbeddingService/Embed": embedding_pb2.EmbedRequest(inputs=[_PROMPT]),
}
_SUBMIT = scheduler_pb2.Submit(
    handle=1, request_id="a", prompt_token_ids=pack([5, 6, 7]), sampling=_SAMPLING
)
TOKENS: dict[str, Message] = {
    "SchedulerService/Generate": scheduler_pb2.SchedulerServiceGenerateRequest(
        prompt_token_ids=[5, 6, 7], sampling=_SAMPLING
    ),
    "SchedulerService/Session": scheduler_pb2.SessionRequest(submit=_SUBMIT),
    "SchedulerService/Abort": scheduler_pb2.AbortRequest(request_ids=["a"]),
    "SchedulerService/SetPriority": scheduler_pb2.SetPriorityRequest(request_id="a", priority=1),
    "SchedulerService/GetStatus": scheduler_pb2.GetStatusRequest(),
}
# Most draws go where most fields are.
WEIGHTS = {"Generate": 6, "GenerateStream": 4, "Chat": 4, "ChatStream": 4, "Session": 6}


class GrpcTarget:
    """The methods of one server, each with a valid request."""

    def __init__(self, name: str, address: str, valid: dict[str, Message]) -> None:
        self.name = name
        self._valid = valid
        self._methods = list(valid)
        self._weights = [WEIGHTS.get(one.rpartition("/")[2], 1) for one in valid]
        self._channel = grpc.aio.insecure_channel(address)
        self._fields = _field_names(valid.values())

    def draw(self, rng: random.Random) -> Case:
        """A message that differs from a valid one in some fields."""
        method = rng.choices(self._methods, self._weights)[0]
        message = type(self._valid[method])()
        message.CopyFrom(self._valid[method])
        if message.DESCRIPTOR.fields:
            for _ in range(rng.choice((1, 1, 2, 3, 5))):
                mutate(message, rng)
        return Case(self.name, method, encode(message, rng))

    async def run(self, case: Case) -> CaseVerdict:
        """Calls the method with these bytes and judges the status."""
        path = f"/pagewire.v1.{case.name}"
        try:
            if case.name.endswith("/Session"):
                return await self._session(path, case.payload)
            method: Any = self._channel.unary_stream(path)
            call = method(case.payload, timeout=LEAVE_S)
            first = await call.read()
            with suppress(TimeoutError):
                async with asyncio.timeout(CUT_S):
                    while first is not grpc.aio.EOF:
                        first = await call.read()
            call.cancel()
            return CaseVerdict("OK")
        except grpc.aio.AioRpcError as error:
            return self._judge(error.code(), error.details() or "")

    async def _session(self, path: str, payload: bytes) -> CaseVerdict:
        call: Any = self._channel.stream_stream(path)(timeout=LEAVE_S)
        await call.write(payload)
        await call.done_writing()
        ends: list[Any] = []
        while (answer := await call.read()) is not grpc.aio.EOF:
            ends.extend(scheduler_pb2.SessionResponse.FromString(answer).finished)
        codes = [end for end in ends if end.status_code]
        by_number = {code.value[0]: code for code in grpc.StatusCode}
        for end in codes:
            return self._judge(by_number[end.status_code], end.message)
        return CaseVerdict("OK")

    def _judge(self, code: grpc.StatusCode, details: str) -> CaseVerdict:
        if code is grpc.StatusCode.UNAVAILABLE:
            return CaseVerdict(code.name, f"unavailable: {details[:200]}", was_lost=True)
        if code in WRONG:
            return CaseVerdict(code.name, f"{code.name}: {details[:200]}")
        words = set(re.findall(r"\w+", details))
        if code in NAMED and not words & self._fields:
            return CaseVerdict(code.name, f"names no field: {details[:200]}")
        return CaseVerdict(code.name)

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()


def _field_names(messages: Sequence[Message] | Any) -> set[str]:
    """The names of all fields of these messages and of those within, and of their oneofs."""
    names, left, seen = {"message", "request"}, [m.DESCRIPTOR for m in messages], set()
    while left:
        descriptor = left.pop()
        if descriptor.full_name in seen:
            continue
        seen.add(descriptor.full_name)
        names |= {oneof.name for oneof in descriptor.oneofs}
        for field in descriptor.fields:
            names.add(field.name)
            if field.message_type is not None:
                left.append(field.message_type)
    return names
