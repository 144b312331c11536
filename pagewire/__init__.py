"""Client of pagewire, a language-model server cut into gRPC services.

>>> import pagewire
>>> client = pagewire.Client()  # doctest: +SKIP
>>> print(client.chat("What is the capital of France?").text)  # doctest: +SKIP
The capital of France is Paris.
"""

from pagewire._aio import AsyncClient
from pagewire._client import Client
from pagewire._errors import (
    Aborted,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    Overloaded,
    PagewireError,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from pagewire._stream import AsyncStream, Stream
from pagewire._types import (
    TLS,
    CallOptions,
    Completion,
    Delta,
    FinishReason,
    Message,
    Messages,
    Model,
    Prompt,
    SamplingParams,
    TokenLogprobs,
    Usage,
)

__version__ = "0.1.0"

__all__ = [
    "TLS",
    "Aborted",
    "AsyncClient",
    "AsyncStream",
    "CallOptions",
    "Cancelled",
    "Client",
    "Completion",
    "DeadlineExceeded",
    "Delta",
    "FailedPrecondition",
    "FinishReason",
    "Internal",
    "InvalidArgument",
    "Message",
    "Messages",
    "Model",
    "NotFound",
    "Overloaded",
    "PagewireError",
    "PermissionDenied",
    "Prompt",
    "SamplingParams",
    "Stream",
    "TokenLogprobs",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "Usage",
    "__version__",
]
