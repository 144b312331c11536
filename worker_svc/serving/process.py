"""Runs one worker process: logging, signals, exit code."""

import logging
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

import kernels
import worker_svc
from wire.identity.watched import BadIdentityFile
from wire.logs.setup import set_up_logging
from wire.server import PortInUse
from wire.tracing.opener import NoTracing
from worker_svc.config import WorkerConfig
from worker_svc.device.device import set_num_threads
from worker_svc.moves.transport import UnknownTransport
from worker_svc.serving.server import RankServer, WorkerServer

GRACE_S = 0.4

log = logging.getLogger(__name__)


MakeServer = Callable[[Callable[[], None]], RankServer]  # takes the callback for a failed start-up


def run(
    config: WorkerConfig,
    make_server: MakeServer | None = None,
    rank: int = 0,
    num_ranks: int = 1,
) -> int:
    """Serves until a signal or a failed start-up; returns the exit code, 1 if start-up failed."""
    set_up_logging(config.logs, "worker", f"rank {rank}" if num_ranks > 1 else "")
    if (foreign := _foreign_kernels()) is not None:
        log.error(
            "another package `kernels` comes first on the path (%s): start the worker with "
            "`pagewire serve worker`, or run `pip uninstall kernels`",
            foreign,
        )
        return 1
    log.info("%d torch threads", set_num_threads(config.threads, num_ranks))
    wake, failed, hurry = threading.Event(), threading.Event(), threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        (hurry if wake.is_set() else wake).set()

    def on_failure() -> None:
        failed.set()
        wake.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    try:
        make_server = make_server or partial(WorkerServer, config)
        server = make_server(on_failure)
    except (BadIdentityFile, NoTracing, PortInUse, UnknownTransport) as error:
        log.error("%s", error)
        return 1
    server.start()
    wake.wait()
    log.info("stopping")
    if not failed.is_set():
        server.drain(config.drain_timeout_s, hurry)
    code = int(failed.is_set())
    if not server.stop(GRACE_S) or num_ranks > 1:
        # A normal exit would wait for threads that still compute or load, and for communicators
        # with ranks that have ended.
        logging.shutdown()
        os._exit(code)
    return code


def _foreign_kernels() -> Path | None:
    """The folder of a package `kernels` that is not next to this package; None where ours is."""
    found = Path(kernels.__file__).parent
    return None if found.parent == Path(worker_svc.__file__).parent.parent else found
