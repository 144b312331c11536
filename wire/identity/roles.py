"""The role that a call needs: the one table for all methods of all services.

A method that is not in it is refused, so that a new one cannot be open by mistake.
"""

from enum import Enum


class Role(Enum):
    """The rights of a caller."""

    OPEN = "open"  # needs no identity
    USER = "user"  # generates, tokenizes, embeds
    OPERATOR = "operator"  # looks into the services, and changes them
    PEER = "peer"  # is a service of this product, and an operator


KEY_ROLES = (Role.USER, Role.OPERATOR)  # what an API key may have

_ROLES_OF_METHODS: dict[str, dict[str, Role]] = {
    "pagewire.v1.InferenceService": {
        "Generate": Role.USER,
        "GenerateStream": Role.USER,
        "Chat": Role.USER,
        "ChatStream": Role.USER,
        "Tokenize": Role.USER,
        "Detokenize": Role.USER,
        "ListModels": Role.USER,
    },
    "pagewire.v1.EmbeddingService": {"Embed": Role.USER},
    "pagewire.v1.DebugService": {
        "ListRequests": Role.OPERATOR,
        "DescribeRequest": Role.OPERATOR,
        "Explain": Role.OPERATOR,
        "DumpBlockPool": Role.OPERATOR,
        "ListSteps": Role.OPERATOR,
        "ProfileSteps": Role.OPERATOR,
    },
    "pagewire.v1.LiveService": {"Watch": Role.OPERATOR},
    "pagewire.v1.SchedulerService": {
        "Session": Role.PEER,
        "Generate": Role.PEER,
        "Abort": Role.OPERATOR,
        "SetPriority": Role.OPERATOR,
        "ResetPrefixCache": Role.OPERATOR,
        "GetStatus": Role.OPERATOR,
        "LoadAdapter": Role.OPERATOR,
        "UnloadAdapter": Role.OPERATOR,
    },
    "pagewire.v1.FleetService": {
        "Register": Role.PEER,
        "Deregister": Role.PEER,
        "AddWorker": Role.OPERATOR,
        "DrainWorker": Role.OPERATOR,
        "RemoveWorker": Role.OPERATOR,
    },
    "pagewire.v1.WorkerService": {
        "Describe": Role.OPERATOR,
        "LoadModel": Role.OPERATOR,
        "InitializeCache": Role.OPERATOR,
        "WarmUp": Role.OPERATOR,
        "LoadAdapter": Role.OPERATOR,
        "UnloadAdapter": Role.OPERATOR,
        "Attach": Role.PEER,
    },
    "grpc.health.v1.Health": {"Check": Role.OPEN, "List": Role.OPEN, "Watch": Role.OPEN},
    "grpc.reflection.v1.ServerReflection": {"ServerReflectionInfo": Role.OPEN},
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": Role.OPEN},
}

METHOD_ROLES = {
    f"/{service}/{method}": role
    for service, methods in _ROLES_OF_METHODS.items()
    for method, role in methods.items()
}
