"""Client of pagewire, a language-model serving engine made of gRPC services.

>>> import pagewire
>>> client = pagewire.Client()  # doctest: +SKIP
>>> print(client.chat("What is the capital of France?").text)  # doctest: +SKIP
The capital of France is Paris.

LLM starts services of its own. It is the one name that brings in the command's code, so it is
imported when it is first asked for.
"""

import importlib
import typing

from pagewire._aio import AsyncClient
from pagewire._beams import BeamSearch
from pagewire._chat import (
    ChatOptions,
    Message,
    Messages,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
)
from pagewire._client import Client
from pagewire._errors import (
    Aborted,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    InvalidOutput,
    NotFound,
    Overloaded,
    PagewireError,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from pagewire._stream import AsyncStream, Stream
from pagewire._structure import (
    Choice,
    Grammar,
    JsonObject,
    JsonSchema,
    Regex,
    StructuredOutput,
)
from pagewire._types import (
    TLS,
    CallOptions,
    ChatCallOptions,
    Completion,
    Delta,
    Embeddings,
    FinishReason,
    Model,
    Pooling,
    Prompt,
    SamplingParams,
    Timings,
    TokenLogprobs,
    Usage,
)

if typing.TYPE_CHECKING:
    from pagewire.offline.llm import LLM as LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "TLS",
    "Aborted",
    "AsyncClient",
    "AsyncStream",
    "BeamSearch",
    "CallOptions",
    "Cancelled",
    "ChatCallOptions",
    "ChatOptions",
    "Choice",
    "Client",
    "Completion",
    "DeadlineExceeded",
    "Delta",
    "Embeddings",
    "FailedPrecondition",
    "FinishReason",
    "Grammar",
    "Internal",
    "InvalidArgument",
    "InvalidOutput",
    "JsonObject",
    "JsonSchema",
    "Message",
    "Messages",
    "Model",
    "NotFound",
    "Overloaded",
    "PagewireError",
    "PermissionDenied",
    "Pooling",
    "Prompt",
    "Regex",
    "SamplingParams",
    "Stream",
    "StructuredOutput",
    "Timings",
    "TokenLogprobs",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolChoice",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "Usage",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name == "LLM":
        return importlib.import_module("pagewire.offline.llm").LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
