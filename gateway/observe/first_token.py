"""The way of first tokens through the gateway, for the last requests."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from gateway.observe.sources import TimedArrivals, TimedOutput
from pagewire.v1 import debug_pb2

KEPT_REQUESTS = 1024  # as many as a scheduler remembers
GATEWAY = "gateway"


@dataclass(frozen=True, slots=True)
class FirstTokenTimes:
    """Times of one output, in seconds of one clock."""

    arrived_s: float
    submitted_s: float
    received_s: float  # from the scheduler
    read_s: float  # as text
    written_s: float  # and the next piece asked for
    has_lost_scheduler: bool = False

    def path(self, scheduler: Iterable[debug_pb2.PathStage]) -> list[debug_pb2.PathStage]:
        """From arrival to writing, around the scheduler's own; the parts add up."""
        inner = list(scheduler)
        away_s = self.received_s - self.submitted_s
        between_s = max(away_s - sum(stage.seconds for stage in inner), 0.0)
        between = "to the scheduler and back" if inner else "at the scheduler"
        if self.has_lost_scheduler:
            between = "lost schedulers, and to the last one and back"
        return [
            _stage("template, tokens, checks", self.submitted_s - self.arrived_s),
            _stage(between, between_s),
            *inner,
            _stage("gather and make text", self.read_s - self.received_s),
            _stage("write", self.written_s - self.read_s),
        ]


class RecentFirstTokens:
    """The times of the last outputs that had a token, by their ids at the scheduler."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, FirstTokenTimes] = OrderedDict()

    def note(
        self, progress: TimedOutput, live: TimedArrivals, arrived_s: float, now_s: float
    ) -> None:
        """Keeps the times of an output whose first piece the client has: it asks for the next."""
        read_s, received_s = progress.first_token_s, live.first_token_s
        if read_s is None or received_s is None:
            return
        self._by_id[progress.scoped_id] = FirstTokenTimes(
            arrived_s, progress.started_s, received_s, read_s, now_s, bool(live.losses_s)
        )
        self._by_id.move_to_end(progress.scoped_id)
        if len(self._by_id) > KEPT_REQUESTS:
            self._by_id.popitem(last=False)

    def find(self, request_id: str) -> FirstTokenTimes | None:
        """The times of an output; None: it is unknown here."""
        return self._by_id.get(request_id)


def _stage(name: str, seconds: float) -> debug_pb2.PathStage:
    return debug_pb2.PathStage(service=GATEWAY, name=name, seconds=max(seconds, 0.0))
