"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, with vLLM's bodies and answers.

Both are about folders of the workers' hosts: they are an operator's, and need an option.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse

from gateway.errors.request_errors import ErrorKind, RequestError, invalid
from gateway.http.schema import Body
from gateway.scheduler.adapters import AdapterAdmin

LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
OPERATORS_PATHS = frozenset({LOAD_PATH, UNLOAD_PATH})
OPTION = "--allow-runtime-lora-updating"


class LoadAdapterBody(Body):
    """POST /v1/load_lora_adapter."""

    lora_name: str | None = None
    lora_path: str | None = None
    load_inplace: bool | None = None
    base_model_name: str | None = None


class UnloadAdapterBody(Body):
    """POST /v1/unload_lora_adapter."""

    lora_name: str | None = None
    lora_int_id: int | None = None


def add_adapter_routes(app: FastAPI, admin: AdapterAdmin | None) -> None:
    """Adds both routes; without an admin they say which option has them work."""

    @app.post(LOAD_PATH, response_class=PlainTextResponse)
    async def load_lora_adapter(body: LoadAdapterBody) -> str:
        allowed = _allowed(admin)
        name, path = _given(body.lora_name, "lora_name"), _given(body.lora_path, "lora_path")
        try:
            await allowed.load(name, path, replaces=bool(body.load_inplace))
        except RequestError as error:
            raise _of_vllm(error, name) from error
        return f"Success: LoRA adapter '{name}' added successfully."

    @app.post(UNLOAD_PATH, response_class=PlainTextResponse)
    async def unload_lora_adapter(body: UnloadAdapterBody) -> str:
        allowed, name = _allowed(admin), _given(body.lora_name, "lora_name")
        try:
            await allowed.unload(name)
        except RequestError as error:
            raise _of_vllm(error, name) from error
        return f"Success: LoRA adapter '{name}' removed successfully."


def _allowed(admin: AdapterAdmin | None) -> AdapterAdmin:
    if admin is None:
        problem = f"adapters are neither loaded nor unloaded here without {OPTION}"
        raise RequestError(ErrorKind.FORBIDDEN, problem)
    return admin


def _given(value: str | None, field: str) -> str:
    if not value:
        raise invalid(field, "must be given")
    return value


def _of_vllm(error: RequestError, name: str) -> RequestError:
    """The error with the status and the words that vLLM has for it."""
    texts: dict[Any, tuple[ErrorKind, str]] = {
        ErrorKind.CONFLICT: (
            ErrorKind.INVALID,
            f"The lora adapter '{name}' has already been loaded. If you want to load the adapter "
            "in place, set 'load_inplace' to True.",
        ),
        ErrorKind.NOT_FOUND: (
            ErrorKind.NOT_FOUND,
            f"The lora adapter '{name}' cannot be found.",
        ),
    }
    if error.kind not in texts:
        return error
    kind, message = texts[error.kind]
    return RequestError(kind, message, field="lora_name")
