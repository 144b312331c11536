"""A thread that runs queued work in order; only the thread "compute" launches device work."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)


class ComputeThread:
    """Runs posted calls one at a time."""

    def __init__(self, name: str = "compute") -> None:
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # A daemon thread: a step that still runs does not delay the end of the process.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, work: Callable[[], None]) -> None:
        """Queues work without waiting; exceptions of the work are only logged."""
        self._inbox.put(work)

    def call(self, work: Callable[[], T]) -> T:
        """Runs work on the thread and returns its result or raises its exception."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self._inbox.put(run)
        return future.result()

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after the queued work; returns False if it still runs after timeout_s."""
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._inbox.get()) is not None:
            try:
                work()
            except Exception:
                log.exception("posted work failed")
