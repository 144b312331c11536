"""Ranks other than 0: repeat the steps of rank 0 in its order; serve health and debugging."""

import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from pagewire.v1 import worker_pb2
from pagewire.v1.rank_pb2 import RankOrder
from worker_svc.adapters.orders import decode_adapter_orders
from worker_svc.config import WorkerConfig
from worker_svc.parallel.group import abandon
from worker_svc.parallel.leader import Ranks
from worker_svc.protocol import codec
from worker_svc.protocol.preparations import decode_orders
from worker_svc.protocol.step import BadStep, StepInput, StepOutput
from worker_svc.runner.model_runner import ModelRunner, Pending
from worker_svc.serving.server import RankServer
from worker_svc.startup.lifecycle import Lifecycle

log = logging.getLogger(__name__)


class Follower(RankServer):
    """The server of one rank other than 0."""

    def __init__(self, config: WorkerConfig, on_failure: Callable[[], None], ranks: Ranks) -> None:
        # Rank r listens on rank 0's port + r, or on any free port, which it reports to rank 0.
        super().__init__(config, on_failure, ranks, config.port and config.port + ranks.rank)
        self._steps: Iterator[StepInput] = iter(())  # of the last frame, not yet computed

    def start(self) -> None:
        """Starts to accept calls, sends the address to rank 0, and waits for orders."""
        super().start()
        self._ranks.pipes[0].send(self.address.encode())
        threading.Thread(target=self._obey_all, name="orders", daemon=True).start()

    def _obey_all(self) -> None:
        while True:
            try:
                message = self._ranks.pipes[0].receive()
            except (EOFError, OSError):  # rank 0 has ended; the supervisor restarts all
                return
            self._obey(RankOrder.FromString(message))

    def _obey(self, order: RankOrder) -> None:
        kind = order.WhichOneof("order")
        if kind in ("load", "initialize_cache", "warm_up"):
            try:
                _advance(self.lifecycle, self._ranks, order)
            except Exception as error:  # rank 0 fails too and reports it
                log.error("%s: %s: %s", kind, type(error).__name__, error)
        else:
            self._compute.post(partial(self._step, order))

    def _step(self, order: RankOrder) -> None:
        runner = self.lifecycle.ready_runner()
        kind = order.WhichOneof("order")
        try:
            if kind == "forget_rows":
                runner.state.forget_rows()
            elif kind == "prepare":
                _prepare(runner, order.prepare)
            elif kind == "changes":
                runner.launch(codec.decode_step(order.changes, runner.limits).changes())
            else:
                if kind == "frame":
                    self._steps = codec.decode_step(order.frame, runner.limits).steps()
                self._launch(runner, next(self._steps))
        except BadStep as error:  # rank 0 refuses it too and ends the stream
            log.warning("refused: %s", error)
        except Exception:
            log.exception("%s failed", kind)
            abandon(f"rank {self._ranks.rank} cannot follow")

    def _launch(self, runner: ModelRunner, step: StepInput) -> None:
        with self._step_limit.over(step.step_id, step.num_tokens):
            launched = runner.launch(step)
        if not isinstance(launched, StepOutput):
            self._answers.post(partial(self._await, launched, step))

    def _await(self, launched: Pending, step: StepInput) -> None:
        with self._step_limit.over(step.step_id, step.num_tokens):
            output = launched.result()
        launched.record(output)
        if output.error:  # an error of the device, which lasts
            abandon(f"rank {self._ranks.rank}: step {output.step_id}: {output.error}")


def _prepare(runner: ModelRunner, frame: bytes) -> None:
    orders, adapters = decode_orders(frame, runner.limits), runner.state.adapters
    if adapters is not None and (others := decode_adapter_orders(frame)) is not None:
        adapters.drop(others.dropped_ids)
        for order in others.wanted:  # rank 0 has given each a place
            adapters.fetch(order)
    elif orders is None:
        runner.forget_prepared()
    else:
        runner.prepare(orders, lambda *_: None)  # rank 0 answers


def _advance(lifecycle: Lifecycle, ranks: Ranks, order: RankOrder) -> None:
    """Executes an order that changes the phase of the life cycle."""
    match order.WhichOneof("order"):
        case "load":
            ranks.store_port = order.load.store_port
            request: worker_pb2.LoadModelRequest = order.load.request
            lifecycle.load_model(Path(request.path), request.dtype, request.served_model_name)
        case "initialize_cache":
            lifecycle.initialize_cache(order.initialize_cache.num_blocks)
        case _:
            lifecycle.warm_up()
