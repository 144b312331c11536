"""gRPC InferenceService: the pipeline, for the SDK and grpcurl.

Cancellation and deadlines cancel these coroutines, which closes the pipeline's iterator, which
aborts the request.
"""

import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

from gateway import limits
from gateway.auth import check_tenant, tenant_of_key
from gateway.chat.convert import conversation_from_proto
from gateway.choices import expand, resume
from gateway.errors import invalid
from gateway.fan_out import complete_all, generate_all
from gateway.generation import GenerationRequest, Prompt, Standing, check_token_ids
from gateway.grpc_api.statuses import Context, RefusalsAsStatuses
from gateway.pipeline import Pipeline
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
from wire.requests.numbers import LONGEST_TIMEOUT_S


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Implements InferenceService."""

    def __init__(self, pipeline: Pipeline, tokenizer: Tokenizer, readiness: ReadinessWatch) -> None:
        self._pipeline = pipeline
        self._tokenizer = tokenizer
        self._readiness = readiness

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        """The whole completion of a prompt."""
        async with RefusalsAsStatuses(context):
            prompt = prompt_from_proto(request.prompt)
            wanted = self._request(prompt, request.options, context)
            name = self._pipeline.resolve_model(wanted.model).name
            first, *more = await self._complete(wanted, request.options)
            return pb.GenerateResponse(
                request_id=wanted.request_id, model=name, output=first, more_outputs=more
            )

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
            async with aclosing(generate_all(self._pipeline, choices)) as deltas:
                async for position, delta in deltas:
                    response = pb.GenerateStreamResponse(request_id=wanted.request_id, model=name)
                    write_delta(response.delta, delta, indices[position])
                    yield response

    async def Chat(self, request: pb.ChatRequest, context: Context) -> pb.ChatResponse:
        """The whole answer to a conversation."""
        async with RefusalsAsStatuses(context):
            conversation = conversation_from_proto(request.messages, request.chat)
            wanted = self._request(conversation, request.options, context)
            name = self._pipeline.resolve_model(wanted.model).name
            first, *more = await self._complete(wanted, request.options)
            return pb.ChatResponse(
                request_id=wanted.request_id, model=name, output=first, more_outputs=more
            )

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
            async with aclosing(generate_all(self._pipeline, choices)) as deltas:
                async for position, delta in deltas:
                    response = pb.ChatStreamResponse(request_id=wanted.request_id, model=name)
                    write_delta(response.delta, delta, indices[position])
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
                    field, text, adds = "messages", self._tokenizer.render(conversation), False
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
        """The served model; empty before a worker attached."""
        async with RefusalsAsStatuses(context):
            model = self._readiness.current.model
            defaults = self._pipeline.sampling_defaults.given()
            return pb.ListModelsResponse(
                models=[] if model is None else [model_to_proto(model)],
                sampling_defaults=types_pb2.SamplingParams(**defaults) if defaults else None,
            )

    async def _wait_to_resume(self, options: pb.GenerationOptions) -> None:
        """Lets a stream that broke with this gateway wait here for a scheduler with a worker."""
        if options.resume_token_ids or options.resume_outputs:
            await self._readiness.wait_for_model()

    async def _complete(
        self, wanted: GenerationRequest, options: pb.GenerationOptions
    ) -> list[pb.Output]:
        """All n outputs, complete."""
        if options.resume_token_ids or options.resume_outputs:
            name = "resume_token_ids" if options.resume_token_ids else "resume_outputs"
            raise invalid(name, "is for streams")
        choices = expand(wanted, num_choices_from_proto(options))
        outputs = await complete_all(self._pipeline, choices)
        return [output_to_proto(output, index) for index, output in enumerate(outputs)]

    def _choices(
        self, wanted: GenerationRequest, options: pb.GenerationOptions
    ) -> tuple[Sequence[int], list[GenerationRequest]]:
        """The requests of a stream, each with the index of its output. Raises RequestError."""
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
        request_id = options.request_id or f"gen-{uuid.uuid4().hex}"
        standing = standing_of(options.priority, options.tenant, context)
        return request_from_proto(request_id, prompt, options, standing)


def standing_of(priority: int, tenant: str, context: Context) -> Standing:
    """The standing of a call; the key names the tenant, else the request or the metadata."""
    metadata = dict(context.invocation_metadata() or ())
    tenant = tenant or str(metadata.get("x-tenant", ""))
    timeout_s: float | None = context.time_remaining()
    if timeout_s is not None and timeout_s > LONGEST_TIMEOUT_S:
        timeout_s = None  # such a deadline says: none
    if (own := tenant_of_key()) is not None:
        check_tenant("tenant", tenant)
        return Standing(priority, own, timeout_s, is_own_tenant=True)
    return Standing(priority, tenant, timeout_s)
