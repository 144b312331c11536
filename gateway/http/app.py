"""The HTTP routes, and the common form of errors. Wiring only."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, Response
from starlette.exceptions import HTTPException

from gateway.callers.body_budget import BodyBudget
from gateway.callers.request_ids import REQUEST_ID, current_id
from gateway.edge.answer_layers import AnswerNames, HeadAsGet, PathPrefix
from gateway.edge.body_guard import BodyGuard, BodyRefused, body_budget
from gateway.edge.clients import OpenRequests
from gateway.edge.edge_limits import EdgeLimits
from gateway.edge.error_answers import error_answer
from gateway.edge.http_guards import ClientLimit, PlainBodies
from gateway.errors import refusals
from gateway.errors.request_errors import (
    ErrorKind,
    RequestError,
    from_http_status,
    invalid,
    unavailable,
)
from gateway.http import fields
from gateway.http.anthropic.routes import add_message_routes
from gateway.http.body_request import BodyRoute
from gateway.http.cohere.routes import add_cohere_routes
from gateway.http.completions import answer
from gateway.http.docs_page import page
from gateway.http.embeddings import EmbeddingBody, embed
from gateway.http.events import CHAT, COMPLETION
from gateway.http.guards import ApiKeyGuard, place
from gateway.http.messages import field_names
from gateway.http.pooling.routes import add_pooling_routes
from gateway.http.response_body import ResponseBody
from gateway.http.responses import Keeping, respond
from gateway.http.routes.adapters import add_adapter_routes
from gateway.http.routes.info import add_info_routes
from gateway.http.routes.tokens import add_token_routes
from gateway.http.schema import ChatCompletionBody, CompletionBody
from gateway.http.scoring.routes import add_scoring_routes
from gateway.http.session_hints import add_session_routes
from gateway.http.stored.routes import add_stored_routes
from gateway.http.token_io.routes import add_token_io_routes
from gateway.http.warning_header import WARNING, WarningHeader
from gateway.page.demo import DemoSwitch
from gateway.page.feed import LiveFeed
from gateway.page.live_routes import add_demo_route, add_live_route
from gateway.page.routes import add_page_routes
from gateway.pipeline.pipeline import Pipeline
from gateway.request.generation import ServedModel
from gateway.request.sampling_defaults import SamplingDefaults
from gateway.scheduler.adapters import AdapterAdmin
from gateway.scheduler.readiness import ReadinessWatch
from gateway.tokens.tokenizer import Tokenizer
from wire.identity.access import Access
from wire.metrics.exposition import Scraped

Scrape = Callable[[str], Scraped]  # by the header `accept`


@dataclass(frozen=True, slots=True)
class OptionalRoutes:
    """Parts of a gateway besides the API: None and False are without."""

    scrape: Scrape | None = None  # reads the metrics
    live: LiveFeed | None = None
    has_page: bool = False
    demo: DemoSwitch | None = None
    responses: Keeping = field(default_factory=Keeping)
    adapters: AdapterAdmin | None = None  # None: they are not loaded or unloaded through it


OWNER = "pagewire"
API_VERSION = "1"
DESCRIPTION = "OpenAI's API with vLLM's extra fields; docs/api.md says what is supported, and how."
# What a page of another origin may read of an answer.
EXPOSED_HEADERS = (WARNING, REQUEST_ID, "retry-after", "retry-after-ms", "x-should-retry")
_TEXT = {"type": "string"}
_ERROR = {
    "type": "object",
    "properties": {
        "message": _TEXT,
        "type": _TEXT,
        "param": {"anyOf": [_TEXT, {"type": "null"}]},
        "code": _TEXT,
    },
    "required": ["message", "type", "param", "code"],
}
_ERROR_BODY = {"type": "object", "properties": {"error": _ERROR}, "required": ["error"]}
FAILURES: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "Every failure; param names the field at fault, where one is.",
        "content": {"application/json": {"schema": _ERROR_BODY}},
    }
}
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "OpenAI's answer or, with stream, its events.",
        "content": {"application/json": {}, "text/event-stream": {"schema": _TEXT}},
    }
}


def create_app(
    pipeline: Pipeline,
    tokenizer: Tokenizer,
    readiness: ReadinessWatch,
    access: Access | None = None,
    edge: EdgeLimits | None = None,
    open_requests: OpenRequests | None = None,
    bodies: BodyBudget | None = None,
    cors_origins: Sequence[str] = (),
    extras: OptionalRoutes | None = None,
    *,
    is_strict: bool = False,
    root_path: str = "",
) -> FastAPI:
    """The application; the caller starts and stops the pipeline.

    With `is_strict` it refuses what it would otherwise accept with a warning. Clients see its paths
    after `root_path`.
    """
    app = _new_app(root_path)
    _add_body_layers(app, edge or EdgeLimits(), bodies, readiness, is_strict=is_strict)
    _add_layers(app, access, open_requests)
    if cors_origins:
        _allow_origins(app, cors_origins)
    _add_outer_layers(app, pipeline, root_path)
    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, handler)
    extras = extras or OptionalRoutes()
    _add_generation_routes(app, pipeline, extras.responses)
    add_token_io_routes(app, pipeline, tokenizer)
    add_message_routes(app, pipeline, tokenizer, ANSWERS)
    _add_retrieval_routes(app, pipeline, tokenizer)
    _add_model_routes(app, pipeline, readiness)
    add_token_routes(app, pipeline, tokenizer)
    add_info_routes(app, pipeline, tokenizer)
    add_adapter_routes(app, extras.adapters)
    add_session_routes(app, pipeline)
    _add_docs(app)
    add_stored_routes(app, extras.responses.store, extras.responses.background, ANSWERS)
    _add_extras(app, extras, readiness)
    return app


def _new_app(root_path: str) -> FastAPI:
    """An application without routes."""
    # The framework's documentation pages would load scripts from a foreign host.
    app = FastAPI(
        title="pagewire",
        version=API_VERSION,
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        servers=[{"url": root_path}] if root_path else None,
        responses=FAILURES,
        generate_unique_id_function=lambda route: route.name,
        # Spans are made by hand: these would know nothing of queue and tokens.
        telemetry={"auto_configure": False, "tracing": False, "metrics": False, "logs": False},
    )
    app.router.route_class = BodyRoute
    return app


def _add_body_layers(
    app: FastAPI,
    edge: EdgeLimits,
    bodies: BodyBudget | None,
    readiness: ReadinessWatch,
    *,
    is_strict: bool,
) -> None:
    """Adds the layers that a body passes while it is received, innermost first."""
    app.state.keep_alive_s = edge.sse_keep_alive_interval

    def max_model_len() -> int:
        model = readiness.current.model
        return 0 if model is None else model.max_model_len

    if not is_strict:
        app.add_middleware(WarningHeader)
    budget = bodies or body_budget(edge)
    app.add_middleware(BodyGuard, edge=edge, budget=budget, max_model_len=max_model_len)


def _add_layers(app: FastAPI, access: Access | None, open_requests: OpenRequests | None) -> None:
    """Adds the layers that a request passes before its body is read, innermost first."""
    app.add_middleware(PlainBodies)
    if open_requests is not None:
        app.add_middleware(ClientLimit, open_requests=open_requests)
    if access is not None:
        app.add_middleware(ApiKeyGuard, access=access)


def _add_outer_layers(app: FastAPI, pipeline: Pipeline, root_path: str) -> None:
    """Adds the layers of all requests, refused ones too; the last one added is outermost."""
    app.add_middleware(AnswerNames, metrics=pipeline.metrics)
    app.add_middleware(HeadAsGet)
    if root_path:
        app.add_middleware(PathPrefix, prefix=root_path)


def _add_extras(app: FastAPI, extras: OptionalRoutes, readiness: ReadinessWatch) -> None:
    if extras.scrape is not None:
        _add_metrics_route(app, extras.scrape)
    if extras.live is not None:
        add_live_route(app, extras.live)
    if extras.has_page:
        add_page_routes(app)
    if extras.demo is not None:
        add_demo_route(app, extras.demo, readiness)


def _allow_origins(app: FastAPI, origins: Sequence[str]) -> None:
    """Lets pages of these origins call; outside of the keys' check: a preflight brings none."""
    app.add_middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "HEAD", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=EXPOSED_HEADERS,
    )


def _add_docs(app: FastAPI) -> None:
    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page(app.openapi()))


def _add_metrics_route(app: FastAPI, scrape: Scrape) -> None:
    @app.get("/metrics", include_in_schema=False)  # for operators: no part of the API
    async def metrics(request: Request) -> Response:
        answer = scrape(request.headers.get("accept", ""))
        return Response(answer.body, headers={"content-type": answer.content_type})


def _add_generation_routes(app: FastAPI, pipeline: Pipeline, keeping: Keeping) -> None:
    @app.post("/v1/chat/completions", responses=ANSWERS)
    async def chat_completions(body: ChatCompletionBody, request: Request) -> Response:
        return await answer(CHAT, body, request, pipeline)

    @app.post("/v1/completions", responses=ANSWERS)
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await answer(COMPLETION, body, request, pipeline)

    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingBody, request: Request) -> Response:
        return await embed(body, request, pipeline)

    @app.post("/v1/responses", responses=ANSWERS)
    async def responses(body: ResponseBody, request: Request) -> Response:
        return await respond(body, request, pipeline, keeping)


def _add_retrieval_routes(app: FastAPI, pipeline: Pipeline, tokenizer: Tokenizer) -> None:
    """The routes that retrieval stacks and routers call."""
    add_cohere_routes(app, pipeline, tokenizer, ANSWERS)
    add_scoring_routes(app, pipeline, tokenizer)
    add_pooling_routes(app, pipeline)


def _add_model_routes(app: FastAPI, pipeline: Pipeline, readiness: ReadinessWatch) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "alive"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        if not readiness.current.is_ready:
            raise unavailable(readiness.current.reason)
        return {"status": "ready"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        bodies = [_model_body(m, pipeline.sampling_defaults) for m in readiness.current.models]
        return {"object": "list", "data": bodies}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return _model_body(pipeline.resolve_model(name), pipeline.sampling_defaults)


def _model_body(model: ServedModel, defaults: SamplingDefaults) -> dict[str, Any]:
    parent = {"parent": model.parent} if model.parent else {}
    return {
        "id": model.name,
        "object": "model",
        "created": 0,  # unknown: model folders have no creation time
        "owned_by": OWNER,
        "max_model_len": model.max_model_len,
        "sampling_defaults": defaults.given(),  # not OpenAI's: for fields that requests leave out
        **parent,
    }


async def _on_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _noted(request, error)


def _noted(request: Request, error: RequestError) -> Response:
    refusals.note(error, place(request.scope), field_names())
    return error_answer(error, request.url.path)


async def _on_bad_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _noted(request, fields.refusal(error.errors()[0], num_outer=1))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error, BodyRefused):
        return _noted(request, error.error)
    message = str(error.detail)
    if error.status_code == 400:  # the framework could not decode it, or it nests too deep
        return _noted(request, invalid("body", "cannot be read as JSON"))
    if error.status_code in (404, 405):
        message = f"{request.method} {request.url.path} is not a route of this gateway"
    return _noted(request, from_http_status(error.status_code, message))


async def _on_bug(request: Request, error: Exception) -> Response:
    problem = "internal error; the gateway's log says more"
    bug = RequestError(ErrorKind.INTERNAL, problem)
    # The server ends the connection, and clients that keep theirs must not send into its end.
    headers = {"connection": "close", REQUEST_ID: current_id()}
    return error_answer(bug, request.url.path, **headers)


_HANDLERS: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    RequestError: _on_refusal,
    RequestValidationError: _on_bad_body,
    HTTPException: _on_http_exception,
    Exception: _on_bug,
}
