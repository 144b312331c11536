"""The HTTP answer of a refused or failed request: status, headers, and a body in its API's form.

Anthropic's routes have error types and statuses of their own; all others have OpenAI's, to which
Cohere's add the message outside of it.
"""

import math
from typing import Any

from fastapi.responses import JSONResponse

from gateway.callers.request_ids import current_id
from gateway.errors.request_errors import OVERLOADED_STATUS, ErrorKind, RequestError, error_body

ANTHROPIC_PATH = "/v1/messages"
COHERE_PATHS = ("/v2/", "/cohere/")
_TYPE_OF_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED_STATUS: "overloaded_error",
}


def is_anthropic(path: str) -> bool:
    """True if the route of a path speaks Anthropic's API."""
    return path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")


def error_answer(error: RequestError, path: str, **headers: str) -> JSONResponse:
    """The answer for a caller of `path`, with the given headers in addition."""
    found = dict(headers)
    if error.kind is ErrorKind.POISON:  # OpenAI's clients would send it again, as after any 500
        found["x-should-retry"] = "false"
    if error.retry_after_s is not None:
        found["retry-after"] = str(math.ceil(error.retry_after_s))
        found["retry-after-ms"] = str(math.ceil(error.retry_after_s * 1e3))
    if is_anthropic(path):
        found["request-id"] = current_id()  # its clients show it
        return JSONResponse(anthropic_body(error), _anthropic_status(error), headers=found)
    body = error_body(error)
    if path.startswith(COHERE_PATHS):  # its clients read the message outside of the error
        body = {"message": error.message} | body
    return JSONResponse(body, error.wire.http_status, headers=found)


def anthropic_body(error: RequestError) -> dict[str, Any]:
    """The JSON body of an error in Anthropic's form, with OpenAI's `param` and `code`."""
    wire, status = error.wire, _anthropic_status(error)
    kind = _TYPE_OF_STATUS.get(status, "invalid_request_error" if status < 500 else "api_error")
    inner = {"type": kind, "message": error.message, "param": error.field, "code": wire.code}
    return {"type": "error", "error": inner}


def _anthropic_status(error: RequestError) -> int:
    is_unavailable = error.kind is ErrorKind.UNAVAILABLE
    return OVERLOADED_STATUS if is_unavailable else error.wire.http_status
