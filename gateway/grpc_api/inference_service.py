"""gRPC InferenceService: the pipeline, for the SDK and grpcurl.

Cancellation and deadlines cancel these coroutines, which closes the pipeline's iterator, which
aborts the request.
"""

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar, cast

from gateway.callers.auth import check_tenant, tenant_of_key
from gateway.callers.request_ids import REQUEST_ID, RULE, is_plain, plain_or_none
from gateway.chat.convert import conversation_from_proto
from gateway.errors import limits
from gateway.errors.request_errors import invalid
from gateway.grpc_api.early_head import with_early_head
from gateway.grpc_api.recent_calls import CallKey, RecentCalls
from gateway.grpc_api.statuses import Context, RefusalsAsStatuses
from gateway.outputs.fan_out import complete_all, generate_all
from gateway.pipeline.pipeline import INLINE_VALUES, Pipeline
from gateway.request.choices import expand, resume
from gateway.request.generation import (
    GenerationRequest,
    OutputDelta,
    Prompt,
    Standing,
    check_token_ids,
)
from gateway.scheduler.convert import (
    model_to_proto,
    num_choices_from_proto,
    output_to_proto,
    prompt_from_proto,
    request_from_proto,
    resumed_from_proto,
    write_delta,
)
from gateway.scheduler.readiness import ReadinessWatch
from gateway.tokens.tokenizer import Tokenizer
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc, types_pb2
from wire.logs.request import about
from wire.requests.numbers import LONGEST_TIMEOUT_S
from wire.tracing.context import context_of

_WholeRequest = pb.GenerateRequest | pb.ChatRequest
_WholeResponse = TypeVar("_WholeResponse", pb.GenerateResponse, pb.ChatResponse)


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Implements InferenceService."""

    def __init__(
        self,
        pipeline: Pipeline,
        tokenizer: Tokenizer,
        readiness: ReadinessWatch,
        head_s: float = 0.0,  # after which a stream begins without a message; 0: it does not
    ) -> None:
        self._pipeline = pipeline
        self._tokenizer = tokenizer
        self._readiness = readiness
        self._recent = RecentCalls()
        self._head_s = head_s

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        """The whole completion of a prompt."""
        async with RefusalsAsStatuses(context):
            prompt = prompt_from_proto(request.prompt)
            wanted = self._request(prompt, request.options, context)
            return await self._whole(request, wanted, pb.GenerateResponse)

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: Context
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        """Streams a completion as it is generated."""
        async with RefusalsAsStatuses(context):
            prompt = prompt_from_proto(request.prompt)
            wanted = self._request(prompt, request.options, context)
            await self._wait_to_resume(request.options)
            name = self._pipeline.resolve_model(wanted.model).name
            indices, choices = self._choices(wanted, request.options)
            deltas = generate_all(self._pipeline, choices)
            async with aclosing(with_early_head(deltas, context, self._head_s)) as deltas:
                async for delta in deltas:
                    response = pb.GenerateStreamResponse(request_id=wanted.request_id, model=name)
                    await self._write(response.delta, delta, indices[delta.choice])
                    yield response

    async def Chat(self, request: pb.ChatRequest, context: Context) -> pb.ChatResponse:
        """The whole answer to a conversation."""
        async with RefusalsAsStatuses(context):
            conversation = conversation_from_proto(request.messages, request.chat)
            wanted = self._request(conversation, request.options, context)
            return await self._whole(request, wanted, pb.ChatResponse)

    async def ChatStream(
        self, request: pb.ChatStreamRequest, context: Context
    ) -> AsyncIterator[pb.ChatStreamResponse]:
        """Streams an answer as it is generated."""
        async with RefusalsAsStatuses(context):
            conversation = conversation_from_proto(request.messages, request.chat)
            wanted = self._request(conversation, request.options, context)
            await self._wait_to_resume(request.options)
            name = self._pipeline.resolve_model(wanted.model).name
            indices, choices = self._choices(wanted, request.options)
            deltas = generate_all(self._pipeline, choices)
            async with aclosing(with_early_head(deltas, context, self._head_s)) as deltas:
                async for delta in deltas:
                    response = pb.ChatStreamResponse(request_id=wanted.request_id, model=name)
                    await self._write(response.delta, delta, indices[delta.choice])
                    yield response

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """The ids of a text or a conversation."""
        async with RefusalsAsStatuses(context):
            model = self._pipeline.resolve_model(request.model or None)
            match request.WhichOneof("input"):
                case "text":
                    field, text, adds = "text", request.text, True
                case "conversation":
                    turns, chat = request.conversation.messages, request.conversation.chat
                    conversation = conversation_from_proto(turns, chat)
                    field, text, adds = "messages", await self._tokenizer.write(conversation), False
                case _:
                    raise invalid("input", "set either text or conversation")
            if request.HasField("add_special_tokens"):
                adds = request.add_special_tokens
            token_ids = await self._tokenizer.encode(field, text, add_special_tokens=adds)
            return pb.TokenizeResponse(token_ids=token_ids, max_model_len=model.max_model_len)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        """The text of some ids."""
        async with RefusalsAsStatuses(context):
            model = self._pipeline.resolve_model(request.model or None)
            token_ids = tuple(request.token_ids)
            limits.check_count("token_ids", len(token_ids), limits.MAX_DETOKENIZE_IDS)
            check_token_ids("token_ids", token_ids, model.vocab_size)
            text = self._tokenizer.decode(
                list(token_ids), skip_special_tokens=request.skip_special_tokens
            )
            return pb.DetokenizeResponse(text=text)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        """The served model and its adapters; empty before a worker attached."""
        async with RefusalsAsStatuses(context):
            defaults = self._pipeline.sampling_defaults.given()
            return pb.ListModelsResponse(
                models=map(model_to_proto, self._readiness.current.models),
                sampling_defaults=types_pb2.SamplingParams(**defaults) if defaults else None,
            )

    async def _wait_to_resume(self, options: pb.GenerationOptions) -> None:
        """Lets a stream that broke with this gateway wait here for a scheduler with a worker."""
        if options.resume_token_ids or options.resume_outputs:
            await self._readiness.wait_for_model()

    async def _whole(
        self, request: _WholeRequest, wanted: GenerationRequest, response: type[_WholeResponse]
    ) -> _WholeResponse:
        """All outputs in one message, computed once for each idempotency key."""

        async def answer() -> _WholeResponse:
            name = self._pipeline.resolve_model(wanted.model).name
            first, *more = await self._complete(wanted, request.options)
            return response(
                request_id=wanted.request_id, model=name, output=first, more_outputs=more
            )

        return await self._once(request, wanted.standing, answer)

    async def _once(
        self,
        request: _WholeRequest,
        standing: Standing,
        answer: Callable[[], Awaitable[_WholeResponse]],
    ) -> _WholeResponse:
        """The answer, by the idempotency key if the caller gave one. Raises RequestError."""
        if not request.options.idempotency_key:
            return await answer()
        key = CallKey(standing.tenant, request.options.idempotency_key)
        return cast(_WholeResponse, await self._recent.run(key, _digest(request), answer))

    async def _complete(
        self, wanted: GenerationRequest, options: pb.GenerationOptions
    ) -> list[pb.Output]:
        """All n outputs, complete."""
        if options.resume_token_ids or options.resume_outputs:
            name = "resume_token_ids" if options.resume_token_ids else "resume_outputs"
            raise invalid(name, "is for streams")
        choices = expand(wanted, num_choices_from_proto(options))
        outputs = await complete_all(self._pipeline, choices)

        def messages() -> list[pb.Output]:
            return [output_to_proto(output, index) for index, output in enumerate(outputs)]

        if sum(output.num_values for output in outputs) <= INLINE_VALUES:
            return messages()
        return await self._pipeline.run_aside(messages)

    async def _write(self, message: pb.OutputDelta, delta: OutputDelta, index: int) -> None:
        """Fills an empty message with a piece of an output."""
        write = partial(write_delta, message, delta, index)
        if delta.prompt is not None and delta.prompt.num_values > INLINE_VALUES:
            await self._pipeline.run_aside(write)
        else:
            write()

    def _choices(
        self, wanted: GenerationRequest, options: pb.GenerationOptions
    ) -> tuple[Sequence[int], list[GenerationRequest]]:
        """The requests of a stream, each with the index of its output. Raises RequestError."""
        if options.idempotency_key:
            raise invalid("idempotency_key", "is for calls without a stream, which resumes instead")
        choices = expand(wanted, num_choices_from_proto(options))
        if len(choices) > 1 and options.resume_token_ids:
            raise invalid("resume_token_ids", f"is for one output, not for {len(choices)}")
        if not options.resume_outputs:
            return range(len(choices)), choices
        indexed = resume(choices, resumed_from_proto(options))
        return [index for index, _ in indexed], [choice for _, choice in indexed]

    def _request(
        self, prompt: Prompt, options: pb.GenerationOptions, context: Context
    ) -> GenerationRequest:
        limit = limits.MAX_IDEMPOTENCY_KEY_BYTES
        limits.check_bytes("idempotency_key", options.idempotency_key, limit)
        standing = standing_of(options.priority, options.tenant, context)
        request_id = given_id_of(options.request_id, context) or _made_id(
            standing.tenant, options.idempotency_key
        )
        about(request_id)
        return request_from_proto(request_id, prompt, options, standing)


def given_id_of(in_request: str, context: Context) -> str | None:
    """The id of the request, else of its metadata. Raises RequestError for one that may not be."""
    if in_request and not is_plain(in_request):
        raise invalid("request_id", RULE)
    return in_request or plain_or_none(text_metadata(context).get(REQUEST_ID))


def _made_id(tenant: str, idempotency_key: str) -> str:
    """An id for a request without one.

    With a key it follows from it, so that the scheduler refuses a second one while the first lives,
    even where it came by another gateway.
    """
    if not idempotency_key:
        return f"gen-{uuid.uuid4().hex}"
    return f"gen-{sha256(f'{tenant}/{idempotency_key}'.encode()).hexdigest()[:32]}"


def _digest(request: _WholeRequest) -> bytes:
    """A digest of the request that stays the same when its client resumes it on another gateway."""
    same: Any = type(request)()
    same.CopyFrom(request)
    same.options.ClearField("num_deaths")
    kind = request.DESCRIPTOR.full_name.encode()
    return sha256(kind + cast(bytes, same.SerializeToString(deterministic=True))).digest()


def standing_of(priority: int, tenant: str, context: Context) -> Standing:
    """The standing of a call; the key names the tenant, else the request or the metadata."""
    metadata = text_metadata(context)
    trace = context_of(metadata)
    tenant = tenant or metadata.get("x-tenant", "")
    timeout_s: float | None = context.time_remaining()
    if timeout_s is not None and timeout_s > LONGEST_TIMEOUT_S:
        timeout_s = None  # such a deadline says: none
    if (own := tenant_of_key()) is not None:
        check_tenant("tenant", tenant)
        return Standing(priority, own, timeout_s, is_own_tenant=True, trace=trace)
    return Standing(priority, tenant, timeout_s, trace=trace)


def text_metadata(context: Context) -> dict[str, str]:
    """The metadata of a call that is text, by name."""
    return {
        str(name): value
        for name, value in context.invocation_metadata() or ()
        if isinstance(value, str)
    }
