"""gRPC EmbeddingService: texts to vectors, for the SDK and grpcurl."""

from gateway.callers.request_ids import new_id
from gateway.grpc_api.embedding_convert import embeddings_from_proto, embeddings_to_proto
from gateway.grpc_api.inference_service import given_id_of, standing_of
from gateway.grpc_api.statuses import Context, RefusalsAsStatuses
from gateway.outputs.fan_out import embed_all
from gateway.pipeline.pipeline import Pipeline
from pagewire.v1 import embedding_pb2 as pb
from pagewire.v1 import embedding_pb2_grpc
from wire.logs.request import about


class EmbeddingService(embedding_pb2_grpc.EmbeddingServiceServicer):
    """Implements EmbeddingService."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """One vector per input, in order."""
        async with RefusalsAsStatuses(context):
            request_id = given_id_of(request.request_id, context) or new_id("embd-")
            about(request_id)
            standing = standing_of(request.priority, request.tenant, context)
            wanted = embeddings_from_proto(request, request_id, standing)
            name = self._pipeline.resolve_model(request.model or None).name
            normalizes = not request.HasField("normalize") or request.normalize
            found = await embed_all(self._pipeline, wanted, "inputs", normalizes)
            return embeddings_to_proto(found, request_id, name)
