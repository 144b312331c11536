"""`python -m scheduler_svc`: the scheduler process."""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Coroutine
from functools import partial
from typing import Any

import grpc
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pagewire.v1 import debug_pb2_grpc, fleet_pb2_grpc, live_pb2_grpc
from scheduler_svc.config import ServiceConfig, parse
from scheduler_svc.debug import DebugService
from scheduler_svc.discovery.fleet import Fleet
from scheduler_svc.discovery.service import FleetService
from scheduler_svc.engine import Engine
from scheduler_svc.journal.recorder import SWITCH_INTERVAL_S
from scheduler_svc.live.service import LiveService
from scheduler_svc.metrics.counts import SchedulerCounts
from scheduler_svc.observe.request_spans import RequestSpans
from scheduler_svc.scrape import SERVICES as SCRAPED_SERVICES
from scheduler_svc.scrape import SchedulerScrape, make_book
from scheduler_svc.service import SchedulerService, add_to_server
from scheduler_svc.standby.watch import Standby
from scheduler_svc.worker.link import FencedOut, open_channel
from wire.aio.server import aio_server
from wire.aio.slow_readers import SlowReaders
from wire.health_port import ACTIVE, LIVENESS, READY_TO_SERVE, aio_health_server
from wire.identity.certificates import certificates_of
from wire.identity.interceptors import AioAccessInterceptor
from wire.identity.peers import peer_opener
from wire.identity.watched import BadIdentityFile
from wire.logs.setup import set_up_logging
from wire.metrics.grpc_calls import AioCallCounter, CallCounts
from wire.metrics.port import MetricsPort, on_loop
from wire.open_streams import AioOpenStreams
from wire.requests.check import RequestCheck
from wire.server import SERVER_OPTIONS, PortInUse, add_reflection, bind
from wire.stop_signals import stop_signals
from wire.tracing.opener import NoTracing, open_tracer

logger = logging.getLogger("scheduler_svc")

SERVICES = (
    "pagewire.v1.SchedulerService",
    "pagewire.v1.DebugService",
    "pagewire.v1.FleetService",
    "pagewire.v1.LiveService",
)
_GRACE_S = 1.0
_DRAIN_POLL_S = 0.05
_EXIT_FENCED = 3


async def serve(config: ServiceConfig) -> int:
    """Runs until SIGTERM or SIGINT (returns 0), or another scheduler takes over (returns 3).

    With a standby delay it first waits until no other scheduler has the workers.

    The signal begins a drain, and a second one ends it.
    """
    first_signal, second_signal = stop_signals()
    counts = SchedulerCounts(config.metrics_tenants, make_book())
    spans = RequestSpans(open_tracer(config.tracing, "scheduler"))
    opener = partial(open_channel, opener=peer_opener(config.identity))
    engine = Engine(config, opener, counts, spans)
    service, health_service = SchedulerService(engine), health.aio.HealthServicer()
    fleet = Fleet(engine)
    servers = _servers(service, fleet, engine, health_service)
    metrics_port = _metrics_port(config, engine)
    for server in servers:
        await server.start()
    if metrics_port is not None:
        metrics_port.start()

    running = asyncio.create_task(_run(engine, fleet))
    reporting = asyncio.create_task(_report_health(engine, health_service))
    stopping = asyncio.create_task(first_signal.wait())
    await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    await health_service.enter_graceful_shutdown()
    if not running.done():
        await _drain(service, running, second_signal, config.drain_timeout_s)
    fenced_out = running.done() and isinstance(running.exception(), FencedOut)
    if running.done() and not fenced_out:
        logger.error("the scheduler failed", exc_info=running.exception())
    elif fenced_out:
        logger.error("%s: this scheduler stops", running.exception())
    service.end_calls()
    for task in (running, reporting, stopping):
        task.cancel()
    await asyncio.gather(running, reporting, stopping, return_exceptions=True)
    await asyncio.gather(*(server.stop(_GRACE_S) for server in servers))
    if metrics_port is not None:
        await asyncio.to_thread(metrics_port.stop)
    await asyncio.to_thread(spans.close)
    if fenced_out:
        return _EXIT_FENCED
    return 1 if running.done() and not running.cancelled() and running.exception() else 0


async def _run(engine: Engine, fleet: Fleet) -> None:
    """Serves until cancelled. Raises FencedOut."""
    await _together(fleet.run(), _serve_in_turn(engine))


async def _serve_in_turn(engine: Engine) -> None:
    """Serves, with a standby delay only when no other scheduler has the workers."""
    if (delay_s := engine.config.standby_delay_s) is None:
        await engine.run()
        return
    standby = Standby(engine, delay_s)
    await standby.wait_for_turn()
    await _together(engine.run(), standby.say_alive())


async def _together(*running: Coroutine[Any, Any, None]) -> None:
    """Runs all until cancelled, or until one raises: the others end with it."""
    tasks = [asyncio.create_task(one) for one in running]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _metrics_port(config: ServiceConfig, engine: Engine) -> MetricsPort | None:
    """The port for Prometheus, bound, if there is to be one. Raises PortInUse."""
    if (port := config.identity.metrics_port) is None:
        return None
    collect = on_loop(asyncio.get_running_loop(), SchedulerScrape(engine).collect)
    return MetricsPort(collect, config.host, port)


def _servers(
    service: SchedulerService,
    fleet: Fleet,
    engine: Engine,
    health_service: health.aio.HealthServicer,
) -> list[grpc.aio.Server]:
    """The scheduler's server and that of its health port, bound. Raises PortInUse."""
    config = engine.config
    identity = config.identity
    access, certificates = identity.peer_access(), certificates_of(identity)
    counts = engine.counts
    interceptors: list[grpc.aio.ServerInterceptor] = [
        AioCallCounter(CallCounts(counts.book, counts.row, SCRAPED_SERVICES)),
        SlowReaders(config.write_timeout_s),
    ]
    if access is not None:
        interceptors.append(AioAccessInterceptor(access))
    interceptors += [AioOpenStreams(), RequestCheck()]
    server = aio_server(SERVER_OPTIONS, interceptors)
    add_to_server(service, server)
    debug_pb2_grpc.add_DebugServiceServicer_to_server(DebugService(engine), server)
    fleet_pb2_grpc.add_FleetServiceServicer_to_server(FleetService(fleet), server)
    live_pb2_grpc.add_LiveServiceServicer_to_server(LiveService(engine), server)
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    add_reflection(server, (*SERVICES, health.SERVICE_NAME), aio=True)
    credentials = None if certificates is None else certificates.grpc_credentials()
    port = bind(server, f"{config.host}:{config.port}", "the scheduler (--port)", credentials)
    logger.info("scheduler listens on %s:%d", config.host, port)
    if identity.health_port is None:
        return [server]
    address = f"{config.host}:{identity.health_port}"
    return [server, aio_health_server(health_service.Check, address)]


async def _report_health(engine: Engine, service: health.aio.HealthServicer) -> None:
    """Reports SERVING exactly while a worker is attached, and liveness in any case.

    For gateways that know several schedulers, ACTIVE says which one to use; for kubelets
    READY_TO_SERVE says that a standby is as it should be, too.
    """
    serving, not_serving = (
        health_pb2.HealthCheckResponse.SERVING,
        health_pb2.HealthCheckResponse.NOT_SERVING,
    )
    await service.set(LIVENESS, serving)
    while True:
        engine.readiness_changed.clear()
        for name, is_so in (
            ("", engine.is_ready),
            (SERVICES[0], engine.is_ready),
            (ACTIVE, not engine.stands_by),
            (READY_TO_SERVE, engine.is_ready or engine.is_warm),
        ):
            await service.set(name, serving if is_so else not_serving)
        await engine.readiness_changed.wait()


async def _drain(
    service: SchedulerService,
    running: "asyncio.Task[None]",
    hurry: asyncio.Event,
    timeout_s: float,
) -> None:
    """Refuses new requests until the open ones have ended, `hurry` is set or the time is up."""
    logger.info("stopping: %d requests are open, %.0f s to end", service.num_open, timeout_s)
    service.drain()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while service.num_open and not hurry.is_set() and not running.done():
                await asyncio.sleep(_DRAIN_POLL_S)
    if service.num_open:
        logger.warning("%d requests are left to the next scheduler", service.num_open)


def main() -> int:
    """Entry point; returns the exit code of the process."""
    config = parse()
    set_up_logging(config.logs, "scheduler")
    if config.record is not None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        return uvloop.run(serve(config))
    except (BadIdentityFile, NoTracing, PortInUse) as error:
        logger.error("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
