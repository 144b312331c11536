"""Registers the worker's services on one gRPC server and sets its health status."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pagewire.v1 import debug_pb2_grpc
from wire.health_port import LIVENESS, health_server
from wire.identity.certificates import certificates_of
from wire.identity.interceptors import AccessInterceptor
from wire.metrics.grpc_calls import CallCounter
from wire.metrics.port import MetricsPort
from wire.open_streams import MOST_IN_THREADS, ThreadedOpenStreams
from wire.requests.check import ThreadedRequestCheck
from wire.server import SERVER_OPTIONS, add_reflection, bind
from wire.tracing.opener import open_tracer
from worker_svc.config import WorkerConfig
from worker_svc.moves.peer_fetches import PeerFetches
from worker_svc.moves.transport import TransportOptions, open_transport
from worker_svc.observe.request_spans import RequestStays
from worker_svc.parallel.leader import Ranks
from worker_svc.process.compute_thread import ComputeThread
from worker_svc.process.failpoints import Failpoints
from worker_svc.process.step_limit import StepLimit
from worker_svc.serving import debug, service
from worker_svc.serving.registration import Registration
from worker_svc.serving.scrape import WorkerScrape
from worker_svc.serving.session import Session
from worker_svc.startup.lifecycle import Lifecycle, WorkerPhase
from worker_svc.startup.precompile import Precompile

# Each open stream occupies a thread: the step stream and a recording of steps among others.
HANDLER_THREADS = 32
# Streams that need no identity have threads of their own. What is beyond the threads waits for one:
# calls that end at once, refusals of such streams included.
THREADS = HANDLER_THREADS + MOST_IN_THREADS
MOST_CALLS = THREADS + 64
DRAIN_POLL_S = 0.05
DRAIN_QUIET_S = 1.0  # without a step, a scheduler has no requests

log = logging.getLogger(__name__)


class RankServer:
    """Common part of all ranks: compute thread, life cycle, health and debug services, server."""

    def __init__(
        self, config: WorkerConfig, on_failure: Callable[[], None], ranks: Ranks, port: int
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._compute = ComputeThread()
        self._answers = ComputeThread("answers")
        self._step_limit = StepLimit(config.step_limit_s)
        self._health = health.HealthServicer()
        self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        self._on_failure = on_failure
        self._scrape = WorkerScrape()
        access, certificates = config.identity.peer_access(), certificates_of(config.identity)
        self._server = grpc.server(
            ThreadPoolExecutor(THREADS, thread_name_prefix="grpc"),
            options=SERVER_OPTIONS,
            interceptors=[
                CallCounter(self._scrape.calls),
                ThreadedOpenStreams(),
                *([] if access is None else [AccessInterceptor(access)]),
                ThreadedRequestCheck(),
            ],
            maximum_concurrent_rpcs=MOST_CALLS,  # refused, where they would wait for ever
        )
        credentials = None if certificates is None else certificates.grpc_credentials()
        self.port = bind(self._server, f"{config.host}:{port}", "the worker", credentials)
        self.address = f"{config.host}:{self.port}"
        self.lifecycle = Lifecycle(config, self._compute, self._on_phase, ranks, self.address)
        self._scrape.lifecycle = self.lifecycle
        debug_pb2_grpc.add_DebugServiceServicer_to_server(
            debug.DebugService(self.lifecycle), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        add_reflection(self._server, self._service_names(), aio=False)

    def start(self) -> None:
        """Starts to accept calls."""
        self._step_limit.start()
        self._server.start()
        log.info("listening on %s", self.address)

    def drain(self, timeout_s: float, hurry: threading.Event) -> None:
        """Returns when no scheduler needs this worker, `hurry` is set, or the time is up."""
        self._health.enter_graceful_shutdown()

    def stop(self, grace_s: float) -> bool:
        """Ends all streams and both threads; returns False if a step or a load is still running."""
        self._health.enter_graceful_shutdown()
        self._server.stop(grace_s).wait()
        return self._compute.stop(grace_s) and self._answers.stop(grace_s)

    def _service_names(self) -> tuple[str, ...]:
        return debug.SERVICE_NAME, health.SERVICE_NAME

    def _on_phase(self, phase: WorkerPhase) -> None:
        if phase is WorkerPhase.READY:
            self._follow_pace()
            self._set_health(health_pb2.HealthCheckResponse.SERVING)
        elif phase is WorkerPhase.FAILED:
            self._on_failure()

    def _follow_pace(self) -> None:
        description = self.lifecycle.description
        assert description is not None  # set in phase READY
        self._step_limit.follow(description.device, description.rehearsed_s)

    def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ("", service.SERVICE_NAME):
            self._health.set(name, status)


class WorkerServer(RankServer):
    """The server of a single worker, or of rank 0 of a group. Schedulers attach to it."""

    def __init__(
        self,
        config: WorkerConfig,
        on_failure: Callable[[], None],
        ranks: Ranks | None = None,
        on_ready: Callable[[], None] = lambda: None,
        compiling: Precompile | None = None,  # compiles the configured model's kernels
    ) -> None:
        super().__init__(config, on_failure, ranks or Ranks(), config.port)
        self._compiling = compiling
        self._on_ready = on_ready
        self._probes: grpc.Server | None = None
        if (health_port := config.identity.health_port) is not None:
            self._probes = health_server(self._health.Check, f"{config.host}:{health_port}")
        self._metrics_port: MetricsPort | None = None
        if (metrics_port := config.identity.metrics_port) is not None:
            self._metrics_port = MetricsPort(self._scrape.collect, config.host, metrics_port)
        tracer = open_tracer(config.tracing, "worker", time.perf_counter)
        self._stays = None if tracer is None else RequestStays(tracer)
        self._registration: Registration | None = None
        if config.register_at:
            self._registration = Registration(config.register_at, config.advertise, config.identity)
        self.lifecycle.peers = _peers(config)
        failpoints = Failpoints(config.failpoints) if config.failpoints else None
        self._session = Session(
            self.lifecycle,
            self._compute,
            self._answers,
            failpoints,
            self._ranks,
            self._step_limit,
        )
        service.add_to_server(service.WorkerService(self.lifecycle, self._session), self._server)

    def start(self) -> None:
        """Starts to accept calls; a configured model is loaded in the background (NOT_SERVING)."""
        super().start()
        if self._probes is not None:
            self._probes.start()
        if self._metrics_port is not None:
            self._metrics_port.start()
        if (folder := self._config.model) is not None:
            start_up = partial(self.lifecycle.start_up, folder, self._compiling)
            threading.Thread(target=start_up, name="start-up", daemon=True).start()

    def drain(self, timeout_s: float, hurry: threading.Event) -> None:
        """Refuses further schedulers; the attached one ends its stream when nothing runs any more.

        One that does not understand that the worker drains may go on while it has steps to send.
        """
        super().drain(timeout_s, hurry)
        self._session.drain()
        if self._registration is not None:
            self._registration.leave()
        deadline_s = time.monotonic() + timeout_s
        last, since_s = self._session.progress, time.monotonic()
        while last is not None and time.monotonic() < deadline_s and not hurry.wait(DRAIN_POLL_S):
            if (now := self._session.progress) != last:
                last, since_s = now, time.monotonic()
                continue
            is_quiet = last.is_idle and time.monotonic() - since_s > DRAIN_QUIET_S
            if is_quiet and not last.knows_of_drain:
                break

    def stop(self, grace_s: float) -> bool:
        self._session.stop()
        stopped = super().stop(grace_s)
        if self._probes is not None:
            self._probes.stop(None).wait()
        if self._metrics_port is not None:
            self._metrics_port.stop()
        if self._stays is not None:
            self._stays.close()
        if self.lifecycle.peers is not None:
            self.lifecycle.peers.close()
        return stopped

    def _service_names(self) -> tuple[str, ...]:
        return service.SERVICE_NAME, *super()._service_names()

    def _on_phase(self, phase: WorkerPhase) -> None:
        super()._on_phase(phase)
        if phase is WorkerPhase.READY:
            self.lifecycle.ready_runner().stays = self._stays
            if self._registration is not None and self.lifecycle.description is not None:
                self._registration.begin(self.lifecycle.description.incarnation)
            self._on_ready()


def _peers(config: WorkerConfig) -> PeerFetches | None:
    """The transports of --kv-transport. Raises UnknownTransport, PortInUse, BadIdentityFile."""
    if not config.kv_transport:
        return None
    options = TransportOptions(config.host, config.kv_port, config.identity)
    return PeerFetches({name: open_transport(name, options) for name in config.kv_transport})
