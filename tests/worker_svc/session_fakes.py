"""Fake runners for a session without a model, and scheduler calls without gRPC."""

import threading
from collections.abc import Callable

import numpy as np

from pagewire.v1 import worker_pb2
from tests.pace import patience
from worker_svc.protocol.codec import Hello
from worker_svc.protocol.preparations import PreparationOrders
from worker_svc.protocol.step import Limits, StepInput, StepOutput
from worker_svc.serving.scheduler_stream import SchedulerStream
from worker_svc.serving.session import Session

LIMITS = Limits(
    num_blocks=9,
    block_size=4,
    max_num_seqs=2,
    max_num_batched_tokens=8,
    max_model_len=16,
    vocab_size=50,
)


class FakeGrammars:
    """Answers each order at once; a grammar that begins with "bad" has a problem."""

    def __init__(self) -> None:
        self.orders: list[PreparationOrders] = []
        self.num_forgotten = 0

    def take_orders(self, orders: PreparationOrders, answer: Callable[[int, str], None]) -> None:
        self.orders.append(orders)
        for order in orders.grammars:
            answer(order.preparation_id, order.grammar if order.grammar.startswith("bad") else "")

    def drop_all(self) -> None:
        self.num_forgotten += 1


class FakeState:
    def __init__(self) -> None:
        self.grammars = FakeGrammars()
        self.adapters = None
        self.num_forgotten = 0

    def forget_rows(self) -> None:
        self.num_forgotten += 1


class FakeRunner:
    """Answers every step; can be told to fail or to block."""

    def __init__(self) -> None:
        self.limits = LIMITS
        self.state = FakeState()
        self.failing: set[int] = set()
        self.executed: list[int] = []
        self.freed: list[int] = []
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()
        self.has_begun = threading.Event()
        self.is_asynchronous = False
        self.tiers: dict[str, object] = {}
        self.disk_tier = None
        self.recording = None
        self.has_pictures_waiting = False

    def prepare(self, orders: PreparationOrders, answer: Callable[[int, str], None]) -> None:
        self.state.grammars.take_orders(orders, answer)

    def forget_prepared(self) -> None:
        self.state.grammars.drop_all()

    def launch(self, step: StepInput, queue_us: int) -> StepOutput:
        self.has_begun.set()
        self.entered.release()
        assert self.gate.wait(patience(10))
        if not step.same_rows and len(step.freed_slots):
            self.freed += step.freed_slots.tolist()
        self.executed.append(step.step_id)
        error = "broken" if step.step_id in self.failing else ""
        return StepOutput(step.step_id, np.zeros(0, dtype=np.int32), error=error)


class FakeLifecycle:
    peers = None

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner

    def ready_runner(self) -> FakeRunner:
        return self._runner


class Flight:
    """A running step that ends when its runner's gate opens."""

    def __init__(self, runner: "SlowRunner", output: StepOutput) -> None:
        self._runner = runner
        self._output = output

    def result(self) -> StepOutput:
        assert self._runner.gate.wait(patience(10))
        return self._output

    def record(self, output: StepOutput) -> None:
        self._runner.recorded.append(output.step_id)


class SlowRunner(FakeRunner):
    """Launches asynchronously; failed launches are reported at once, results later."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asynchronous = True
        self.launched = threading.Semaphore(0)
        self.recorded: list[int] = []

    def launch(self, step: StepInput, queue_us: int) -> StepOutput | Flight:
        self.executed.append(step.step_id)
        self.launched.release()
        error = "broken" if step.step_id in self.failing else ""
        output = StepOutput(step.step_id, np.zeros(0, dtype=np.int32), error=error)
        return output if error else Flight(self, output)


def attach(session: Session, epoch: int) -> SchedulerStream:
    return session.attach(Hello(protocol_version=2, epoch=epoch, first_step_id=1))


def submit(
    session: Session, stream: SchedulerStream, step_id: int, ack: int = 0, reset: bool = False
) -> None:
    step = worker_pb2.SchedulerOutput(step_id=step_id, ack_step_id=ack, reset=reset or step_id == 1)
    stream.wait_for_room()
    session.submit(stream, worker_pb2.AttachRequest(step=step).SerializeToString())


def receive(stream: SchedulerStream) -> tuple[int, str]:
    frame = stream.outbox.get(timeout=patience(10))
    assert isinstance(frame, bytes)
    output = worker_pb2.AttachResponse.FromString(frame).output
    return output.step_id, output.error
