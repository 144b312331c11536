"""Replays a recording on a core and compares its answers with the recorded ones, call by call."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from pagewire.v1.journal_pb2 import JournalEvent
from scheduler_svc.core import OutOfStep, Refused, Scheduler
from scheduler_svc.journal.calls import UnknownCall, perform
from scheduler_svc.journal.events import Call, arguments_of, outcome_of, to_event
from scheduler_svc.journal.recording import Recording
from scheduler_svc.journal.values import BadValues
from wire.columns import INT32, unpack

_COMPARED = ("raised", "outcome", "step", "plan")
_SHOWN = 12  # elements of a column shown in a report


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between recording and replay."""

    where: str
    field: str
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return (
            f"{self.where}: {self.field} differs\n"
            f"  recorded: {self.recorded}\n"
            f"  replayed: {self.replayed}"
        )


@dataclass(slots=True)
class ReplayReport:
    """The events that were replayed, and the first divergence if there was one."""

    num_events: int = 0
    num_steps: int = 0
    last_step_id: int = 0
    num_tokens: int = 0
    num_preemptions: int = 0
    num_workers_lost: int = 0
    divergence: Divergence | None = None
    notes: list[str] = field(default_factory=list)

    def count(self, event: JournalEvent) -> None:
        """Counts an event that matched."""
        self.num_events += 1
        if event.HasField("step"):
            num_steps = max(event.step.granted_steps, 1)
            self.num_steps += num_steps
            self.last_step_id = event.step.step_id + num_steps - 1
            self.num_preemptions += len(event.plan.preempted)
        elif event.call == "update":
            self.num_tokens += outcome_of(event)["num_tokens"]
        elif event.call == "skip":
            self.num_steps -= outcome_of(event)["count"]
        elif event.call == "worker_lost":
            self.num_workers_lost += 1

    def __str__(self) -> str:
        return (
            f"{self.num_events} events, {self.num_steps} steps up to {self.last_step_id}, "
            f"{self.num_tokens} tokens, {self.num_preemptions} preemptions, "
            f"{self.num_workers_lost} workers lost"
        )


def replay(recording: Recording, to_step: int | None = None) -> ReplayReport:
    """Replays everything, up to `to_step`, or up to the first divergence.

    Raises NotReplayable, Damaged or BadValues when the recording itself is faulty.
    """
    return play(recording, recording.restore(), to_step=to_step)


def play(
    recording: Recording,
    core: Scheduler,
    *,
    num_segments: int | None = None,
    to_step: int | None = None,
) -> ReplayReport:
    """Replays on a core that is in the recording's first state; leaves it in the last one."""
    report = ReplayReport()
    for stored in recording.events(num_segments):
        report.divergence = _compared(stored.event, core)
        if report.divergence is not None:
            break
        report.count(stored.event)
        if is_answer_to(stored.event, to_step):
            break
    return report


def is_answer_to(event: JournalEvent, step_id: int | None) -> bool:
    """True if this event is the result of the step, or of a later one."""
    if step_id is None or event.call != "update":
        return False
    return bool(arguments_of(event)[0].step_id >= step_id)


def _compared(event: JournalEvent, core: Scheduler) -> Divergence | None:
    """As compare(); raises BadValues for arguments that are not those of the call."""
    try:
        return compare(event, core)
    except (BadValues, UnknownCall):
        raise
    except (AttributeError, TypeError, ValueError) as error:
        problem = f"event {event.number} ({event.call}) cannot be performed"
        raise BadValues(f"{problem}: {type(error).__name__}: {error}") from error


def compare(event: JournalEvent, core: Scheduler) -> Divergence | None:
    """Performs an event on a core; returns the difference, or None when it matched."""
    arguments = arguments_of(event)
    where = f"event {event.number} ({event.call}{_about(event, arguments)})"
    answer: Any = None
    refused: Refused | None = None
    try:
        answer = perform(core, event.call, arguments)
    except Refused as error:
        refused = error
    except (OutOfStep, AssertionError, LookupError, ArithmeticError) as error:
        # Failed calls are not recorded, so the core differs.
        return Divergence(where, "what happens", "an answer", f"{type(error).__name__}: {error}")
    replayed = to_event(event.number, Call(event.call, arguments, answer, refused))
    for name in _COMPARED:
        if getattr(event, name) != getattr(replayed, name):
            difference = next(_differences(name, event, replayed))
            return Divergence(where, *difference)
    return None


def _about(event: JournalEvent, arguments: tuple[Any, ...]) -> str:
    """The step or request of an event, as text."""
    if event.HasField("step"):
        return f" of step {event.step.step_id}"
    first: Any = arguments[0] if arguments else None
    if event.call == "update":
        return f" with step {first.step_id}"
    request_id = first if isinstance(first, str) else getattr(first, "request_id", None)
    return "" if request_id is None else f" of {request_id!r}"


def _differences(path: str, recorded: Message, replayed: Message) -> Iterator[tuple[str, str, str]]:
    """(name, recorded value, replayed value) of each difference in the field `path`, in order."""
    name = path.rpartition(".")[2]
    descriptor = recorded.DESCRIPTOR.fields_by_name[name]
    ours, theirs = getattr(recorded, name), getattr(replayed, name)
    if descriptor.type != FieldDescriptor.TYPE_MESSAGE:
        yield path, _shown(ours), _shown(theirs)
    elif descriptor.is_repeated:
        yield from _repeated(path, ours, theirs)
    elif recorded.HasField(name) != replayed.HasField(name):
        yield path, _presence(recorded, name), _presence(replayed, name)
    elif name == "outcome":
        yield path, ours.json, theirs.json
    else:
        yield from _inside(path, ours, theirs)


def _inside(path: str, ours: Message, theirs: Message) -> Iterator[tuple[str, str, str]]:
    for descriptor in ours.DESCRIPTOR.fields:
        if getattr(ours, descriptor.name) != getattr(theirs, descriptor.name):
            yield from _differences(f"{path}.{descriptor.name}", ours, theirs)


def _repeated(path: str, ours: Any, theirs: Any) -> Iterator[tuple[str, str, str]]:
    if len(ours) != len(theirs):
        yield f"the number of {path}", str(len(ours)), str(len(theirs))
    for number, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            yield from _inside(f"{path}[{number}]", one, other)


def _presence(message: Message, name: str) -> str:
    return f"there is a {name}" if message.HasField(name) else f"there is no {name}"


def _shown(value: Any) -> str:
    """A value in one line; columns as numbers."""
    if isinstance(value, bytes):
        if len(value) % INT32.itemsize:
            return value.hex(" ")
        value = unpack(value).tolist()
    if isinstance(value, list) and len(value) > _SHOWN:
        return f"{value[:_SHOWN]} and {len(value) - _SHOWN} more"
    return repr(value)
