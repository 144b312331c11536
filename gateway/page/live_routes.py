"""The routes of the live stream and of the demo's kill switch."""

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from gateway.errors.request_errors import ErrorKind, RequestError
from gateway.page.demo import DemoSwitch, check_is_local
from gateway.page.feed import LiveFeed
from gateway.scheduler.readiness import ReadinessWatch

LIVE_PATH = "/v1/live"
KILL_PATH = "/v1/demo/kill-worker"
OPERATORS_PATHS = frozenset({LIVE_PATH, KILL_PATH})
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


def add_live_route(app: FastAPI, feed: LiveFeed) -> None:
    """Adds the stream."""

    @app.get(LIVE_PATH, include_in_schema=False)  # for operators: no part of the API
    async def live() -> Response:
        events = feed.open()
        return StreamingResponse(events, media_type="text/event-stream", headers=_HEADERS)


def add_demo_route(app: FastAPI, switch: DemoSwitch, readiness: ReadinessWatch) -> None:
    """Adds the kill switch."""

    @app.post(KILL_PATH, include_in_schema=False)
    async def kill_worker(request: Request) -> Response:
        client = request.client.host if request.client else ""
        check_is_local(client, request.headers.get("host"), request.headers.get("origin"))
        if not readiness.current.is_ready:
            raise RequestError(ErrorKind.CONFLICT, "no worker is attached: there is none to kill")
        switch.kill_worker()
        return JSONResponse({"status": "the worker is being killed"}, 202)
