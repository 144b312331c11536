"""Converts between protobuf messages and embedding requests and results."""

from collections.abc import Sequence

from gateway.errors import limits
from gateway.errors.request_errors import invalid
from gateway.request.choices import total_usage
from gateway.request.embeddings import PromptEmbedding
from gateway.request.generation import GenerationRequest, PromptPooling, Standing
from gateway.scheduler.convert import POOLING_FROM_PROTO, prompt_from_proto, usage_to_proto
from pagewire.v1 import embedding_pb2 as pb


def embeddings_from_proto(
    request: pb.EmbedRequest, request_id: str, standing: Standing
) -> list[GenerationRequest]:
    """The requests from a gRPC client, one per input."""
    if not request.inputs:
        raise invalid("inputs", "is empty")
    limits.check_count("inputs", len(request.inputs), limits.MAX_EMBEDDING_INPUTS)
    if request.pooling not in POOLING_FROM_PROTO:
        raise invalid("pooling", f"{request.pooling} is unknown")
    return [
        GenerationRequest(
            request_id=request_id if len(request.inputs) == 1 else f"{request_id}-{index}",
            prompt=prompt_from_proto(prompt, f"inputs[{index}]"),
            standing=standing,
            model=request.model or None,
            pooling=POOLING_FROM_PROTO[request.pooling] or PromptPooling.LAST,
        )
        for index, prompt in enumerate(request.inputs)
    ]


def embeddings_to_proto(
    found: Sequence[PromptEmbedding], request_id: str, model: str
) -> pb.EmbedResponse:
    """The vectors for a gRPC client."""
    return pb.EmbedResponse(
        request_id=request_id,
        model=model,
        embeddings=[pb.Embedding(values=one.vector.tolist()) for one in found],
        usage=usage_to_proto(total_usage([one.usage for one in found], num_choices=1)),
    )
