"""A plaintext port for Prometheus: `GET /metrics` over HTTP/1, and nothing else."""

import asyncio
import logging
import socket
import socketserver
import threading
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler
from typing import Any

from prometheus_client.core import Metric

from wire.metrics.exposition import Collect, scraped
from wire.server import PortInUse

PATH = "/metrics"
MAX_SCRAPES = 4  # at once; a further connection is closed
TIMEOUT_S = 10.0  # for a request to arrive, for its answer to leave, and for the loop to answer

log = logging.getLogger("wire.metrics")


class MetricsPort:
    """Listens from the start; serves between start() and stop(). Raises PortInUse."""

    def __init__(
        self, collect: Collect, host: str, port: int, *, shares_port: bool = False
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        kind = type("_Listener", (_Server,), {"address_family": family})
        try:
            self._server: _Server = kind(host.strip("[]"), port, collect, shares_port)
        except OSError as error:
            problem = f"the metrics port (--metrics-port) cannot listen on {host}:{port}"
            raise PortInUse(f"{problem}: is the port in use?") from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )

    def start(self) -> None:
        """Begins to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Ends, without waiting for scrapes that run."""
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()


def on_loop(loop: asyncio.AbstractEventLoop, collect: Collect) -> Collect:
    """`collect` for the port's threads, called on the loop whose state it reads."""

    async def read() -> Iterable[Metric]:
        return [*collect()]

    def ask() -> Iterable[Metric]:
        reading = asyncio.run_coroutine_threadsafe(read(), loop)
        try:
            return reading.result(TIMEOUT_S)
        finally:
            reading.cancel()

    return ask


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, collect: Collect, shares_port: bool) -> None:
        self.collect = collect
        self.allow_reuse_port = shares_port
        self._free = threading.BoundedSemaphore(MAX_SCRAPES)
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread, unless too many run."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left: no concern of the service."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = TIMEOUT_S
    server_version, sys_version = "pagewire", ""

    def do_GET(self) -> None:
        """The metrics."""
        if self.path.partition("?")[0] != PATH:
            self.send_error(404, f"this port has {PATH} alone")
            return
        try:
            answer = scraped(self.server.collect(), self.headers.get("accept", ""))
        except Exception as error:  # of the service, which may be stopping
            log.warning("metrics cannot be read: %s", type(error).__name__)
            self.send_error(503, "the service does not answer")
            return
        self.send_response(200)
        self.send_header("content-type", answer.content_type)
        self.send_header("content-length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not logged."""
