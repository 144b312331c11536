"""The gateway process: both servers and the scheduler's stream on one event loop."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import uvicorn
from fastapi import FastAPI
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from gateway.callers.text_turns import MIB
from gateway.chat.answer import ChatFormat, choose
from gateway.chat.pictures import taken
from gateway.edge.body_guard import body_budget
from gateway.edge.clients import OpenRequests
from gateway.edge.http_connection import guarded
from gateway.errors.request_errors import unavailable
from gateway.grpc_api.call_limits import CallLimit
from gateway.grpc_api.debug_service import DebugService
from gateway.grpc_api.embedding_service import EmbeddingService
from gateway.grpc_api.inference_service import InferenceService
from gateway.http.app import OptionalRoutes, create_app
from gateway.http.responses import Keeping
from gateway.http.stored.background import BackgroundResponses
from gateway.http.stored.store import ResponseStore
from gateway.page.demo import DemoSwitch
from gateway.page.feed import LiveFeed
from gateway.page.latency import BOUNDS, LatencyCells
from gateway.pipeline.pipeline import Pipeline
from gateway.process.config import GatewayConfig
from gateway.process.heartbeats import beat
from gateway.process.pictures import picture_reader
from gateway.process.scrape import GatewayCounters, GatewayScrape, SharedMemory
from gateway.request.sampling_defaults import read_defaults
from gateway.scheduler.adapters import AdapterAdmin
from gateway.scheduler.link import SchedulerLink
from gateway.scheduler.readiness import Readiness, ReadinessWatch
from gateway.tokens.tokenizer import Tokenizer
from pagewire.v1 import debug_pb2_grpc, embedding_pb2_grpc, inference_pb2_grpc
from wire.aio.server import aio_server
from wire.aio.slow_readers import SlowReaders
from wire.health_port import LIVENESS, aio_health_server
from wire.identity.access import Access
from wire.identity.certificates import Certificates, certificates_of
from wire.identity.interceptors import AioAccessInterceptor
from wire.identity.options import is_loopback
from wire.identity.peers import peer_opener
from wire.metrics.grpc_calls import AioCallCounter
from wire.metrics.port import MetricsPort, on_loop
from wire.open_streams import AioOpenStreams
from wire.requests.check import RequestCheck
from wire.server import CHANNEL_OPTIONS, SERVER_OPTIONS, PortInUse, add_reflection, bind
from wire.stop_signals import stop_signals
from wire.tracing.opener import open_tracer

INFERENCE_SERVICE = "pagewire.v1.InferenceService"
EMBEDDING_SERVICE = "pagewire.v1.EmbeddingService"
DEBUG_SERVICE = "pagewire.v1.DebugService"
HEALTH_NAMES = ("", INFERENCE_SERVICE, EMBEDDING_SERVICE)

# gRPC's default backoff of up to a minute would outlast any restart of the scheduler.
LINK_OPTIONS = [
    *CHANNEL_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    # No pause, but the time that an attempt has, its handshake included: with less a gateway never
    # reaches a scheduler on a busy machine. What is refused is tried again after the pauses.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]
DRAIN_POLL_S = 0.05
FLUSH_S = 3.0  # for the ends of requests that the drain left
LAST_BYTES_S = 0.3  # for answers that have just ended
LISTEN_BACKLOG = 2048

log = logging.getLogger("gateway.process.server")


class HttpServer(uvicorn.Server):
    """uvicorn without signal handlers: the process handles signals for both servers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves the signals alone."""
        yield


@dataclass(frozen=True, slots=True)
class ListenPorts:
    """The ports that the servers listen on."""

    http: int
    grpc: int


def _for_chats(config: GatewayConfig, tokenizer: Tokenizer) -> tuple[Tokenizer, ChatFormat]:
    """The tokenizer as the options want chats to be rendered, and the formats of the answers."""
    if config.text_contents:
        tokenizer = tokenizer.with_text_contents()
    parsers = config.tool_call_parser, config.reasoning_parser
    chat_format = choose(tokenizer.template, *parsers, *tokenizer.markers())
    if chat_format.tells_in_words:
        tokenizer = tokenizer.with_tools_in_words()
    return tokenizer, chat_format


class Gateway:
    """One gateway: call start(), then stop()."""

    def __init__(self, config: GatewayConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        tokenizer, chat_format = _for_chats(config, tokenizer.limited(config.edge.texts))
        fd, row = config.metrics_fd, config.metrics_row
        self._counters = GatewayCounters(None if fd is None else SharedMemory(fd, row))
        self._background = BackgroundResponses()
        self._channel, self._link = self._open_link()
        served_name = config.served_model_name
        self._readiness = ReadinessWatch(self._channel, self._link, tokenizer, served_name)
        pictures = picture_reader(config)
        self._pipeline = Pipeline(
            tokenizer,
            self._link,
            self._readiness,
            chat_format,
            sampling_defaults=read_defaults(config.model, config.generation_config),
            metrics=self._counters.requests,
            tracer=open_tracer(config.tracing, "gateway"),
            grammar_limits=config.edge.grammars,
            pictures=pictures,
        )
        self._scrape = GatewayScrape(self._counters, self._pipeline, self._link, self._readiness)
        latency = LatencyCells(self._counters.book, self._counters.rows.totals)
        self._live = LiveFeed(self._channel, latency.read, self._bounds())
        self._health = health.aio.HealthServicer()
        access = config.identity.public_access(config.api_key)
        self._certificates = certificates_of(config.identity)
        most = config.edge.max_streams_per_client
        opened = OpenRequests(most) if pictures is None else OpenRequests(most, around=taken)
        self.bodies = body_budget(config.edge)
        app = create_app(
            self._pipeline,
            tokenizer,
            self._readiness,
            access,
            config.edge,
            opened,
            self.bodies,
            config.cors_origins,
            self._extras(),
            is_strict=config.strict_requests,
            root_path=config.root_path,
        )
        self._http = HttpServer(_uvicorn_config(app, config, self._certificates))
        self._grpc = self._grpc_server(tokenizer, access, opened)
        self._probes: grpc.aio.Server | None = None
        self._metrics_port: MetricsPort | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._http_task: asyncio.Task[None] | None = None

    def _open_link(self) -> tuple[grpc.aio.Channel, SchedulerLink]:
        config, target = self._config, self._config.scheduler_target
        options = [*LINK_OPTIONS, *target.options]
        channel = peer_opener(config.identity)(target.name, options)
        link = SchedulerLink(
            channel,
            target.name,
            config.scheduler_timeout_s,
            config.gather_ms / 1e3,
            self._counters.requests.lost_scheduler,
            has_standby=target.has_several,
        )
        return channel, link

    def _bounds(self) -> dict[str, Any]:
        """Facts that viewers of the live stream hear once."""
        return {"is_demo": self._config.demo is not None, **BOUNDS}

    def _extras(self) -> OptionalRoutes:
        demo = None if self._config.demo is None else DemoSwitch(self._config.demo)
        max_bytes = self._config.store_responses * MIB
        store = ResponseStore(max_bytes) if max_bytes else None
        has_page = not self._config.no_page
        keeping = Keeping(store, self._background)
        adapters = None
        if self._config.allow_runtime_lora_updating:
            adapters = AdapterAdmin(self._channel, self._readiness)
        return OptionalRoutes(self._scrape.answer, self._live, has_page, demo, keeping, adapters)

    def _grpc_server(
        self, tokenizer: Tokenizer, access: Access | None, opened: OpenRequests
    ) -> grpc.aio.Server:
        interceptors: list[grpc.aio.ServerInterceptor] = [
            AioCallCounter(self._counters.calls),
        ]
        if access is not None:
            interceptors.append(AioAccessInterceptor(access))
        interceptors.append(CallLimit(opened, self.bodies))
        interceptors += [AioOpenStreams(), RequestCheck()]
        interceptors.append(SlowReaders(self._config.edge.write_timeout_s))
        # If an option is given twice, gRPC uses the first.
        reuseport = ("grpc.so_reuseport", int(self._config.share_ports))
        options = [reuseport, *self._config.edge.grpc_options, *SERVER_OPTIONS]
        server = aio_server(options, interceptors)
        self._inference = InferenceService(
            self._pipeline,
            tokenizer,
            self._readiness,
            self._config.edge.sse_keep_alive_interval,
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self._inference, server)
        embedding_pb2_grpc.add_EmbeddingServiceServicer_to_server(
            EmbeddingService(self._pipeline), server
        )
        debug_pb2_grpc.add_DebugServiceServicer_to_server(
            DebugService(self._pipeline, self._channel), server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (INFERENCE_SERVICE, EMBEDDING_SERVICE, DEBUG_SERVICE, health.SERVICE_NAME)
        add_reflection(server, names, aio=True)
        return server

    async def start(self) -> ListenPorts:
        """Starts listening. Raises PortInUse. Not ready before the scheduler is."""
        config = self._config
        listener = _listen(config.host, config.http_port, shares=config.share_ports)
        try:
            grpc_port = self._bind_grpc()
        except PortInUse:
            listener.close()
            raise
        for name in HEALTH_NAMES:
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        if self._probes is not None:
            await self._probes.start()
        if self._metrics_port is not None:
            self._metrics_port.start()
        await self._grpc.start()
        self._http_task = asyncio.create_task(self._http.serve(sockets=[listener]))
        self._tasks = [
            asyncio.create_task(self._link.run()),
            asyncio.create_task(self._readiness.run(self._on_readiness)),
        ]
        if config.metrics_fd is not None:
            self._tasks.append(asyncio.create_task(self._scrape.keep_noting()))
        ports = ListenPorts(listener.getsockname()[1], grpc_port)
        log.info("HTTP on %s:%d, gRPC on %s:%d", config.host, ports.http, config.host, ports.grpc)
        if config.api_key is not None:
            log.info("one API key, with all roles; --api-keys has several, with tenants and roles")
        elif config.identity.api_keys is None and not is_loopback(config.host):
            log.warning("no API keys: all who reach %s may use this gateway", config.host)
        return ports

    def _bind_grpc(self) -> int:
        """Binds the API, the health and the metrics port; returns the API's. Raises PortInUse."""
        config, health_port = self._config, self._config.identity.health_port
        credentials = self._certificates.grpc_credentials() if self._certificates else None
        address = f"{config.host}:{config.grpc_port}"
        port = bind(self._grpc, address, "the gRPC API", credentials)
        if health_port is not None:
            self._probes = aio_health_server(
                self._health.Check, f"{config.host}:{health_port}", shares_port=config.share_ports
            )
        if (metrics_port := config.identity.metrics_port) is not None:
            collect = on_loop(asyncio.get_running_loop(), self._scrape.collect)
            self._metrics_port = MetricsPort(
                collect, config.host, metrics_port, shares_port=config.share_ports
            )
        return port

    async def _on_readiness(self, readiness: Readiness) -> None:
        serving = health_pb2.HealthCheckResponse.SERVING
        status = serving if readiness.is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in HEALTH_NAMES:
            await self._health.set(name, status)

    async def stop(self, hurry: asyncio.Event | None = None) -> None:
        """Drains, then closes all. Requests that the drain left end with an error."""
        await self._drain(hurry or asyncio.Event())
        self._live.close()
        await self._background.close()
        if self._pipeline.num_open:
            log.warning("%d requests are left, and end with an error", self._pipeline.num_open)
        self._link.end_all(unavailable("this gateway has shut down before the output ended"))
        self._http.should_exit = True
        # Health watchers never end; only generations have been waited for.
        await self._grpc.stop(FLUSH_S if self._pipeline.num_open else LAST_BYTES_S)
        if self._probes is not None:
            await self._probes.stop(None)
        if self._metrics_port is not None:
            await asyncio.to_thread(self._metrics_port.stop)
        if self._http_task is not None:
            await self._http_task
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()
        await asyncio.to_thread(self._pipeline.close)
        log.info("stopped")

    async def _drain(self, hurry: asyncio.Event) -> None:
        """Refuses new requests until open ones have ended, `hurry` is set or the time is up.

        The servers listen meanwhile: a refusal tells more than a closed port.
        """
        timeout_s, num_open = self._config.drain_timeout_s, self._pipeline.num_open
        log.info("stopping: %d requests are open, %.0f s to end", num_open, timeout_s)
        self._readiness.drain()
        await self._health.enter_graceful_shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._pipeline.num_open and not hurry.is_set():
                    await asyncio.sleep(DRAIN_POLL_S)

    async def failure(self) -> None:
        """Returns or raises when a part that should run forever has ended."""
        parts = [*self._tasks, *([self._http_task] if self._http_task is not None else [])]
        done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


def _uvicorn_config(
    app: FastAPI, config: GatewayConfig, certificates: Certificates | None
) -> uvicorn.Config:
    def tls(*_: object) -> ssl.SSLContext:
        assert certificates is not None
        return certificates.ssl_context()

    return uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        http=guarded(config.edge),
        timeout_keep_alive=max(1, round(config.edge.keep_alive_s)),
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=int(FLUSH_S),
        ssl_context_factory=None if certificates is None else tls,
    )


def _listen(host: str, port: int, *, shares: bool = False) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol must be named: asyncio disables Nagle's algorithm only then.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shares:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        problem = f"the HTTP API cannot listen on {host}:{port}: is the port in use?"
        raise PortInUse(problem) from error
    listener.setblocking(False)
    return listener


async def serve(config: GatewayConfig, tokenizer: Tokenizer) -> None:
    """Runs a gateway until SIGTERM or SIGINT; a second signal ends the drain."""
    wanted_end, hurry = stop_signals()
    gateway = Gateway(config, tokenizer)
    await gateway.start()
    beating = asyncio.create_task(beat(config.heartbeat_fd))
    ending = asyncio.create_task(wanted_end.wait())
    failing = asyncio.create_task(gateway.failure())
    await asyncio.wait((ending, failing), return_when=asyncio.FIRST_COMPLETED)
    await gateway.stop(hurry)
    beating.cancel()
    if failing.done() and not wanted_end.is_set():
        failing.result()
        raise RuntimeError("a part of the gateway ended by itself")
    ending.cancel()
    await asyncio.gather(ending, failing, return_exceptions=True)
