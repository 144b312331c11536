"""Requests that ended recently, for later questions about where their time went."""

from dataclasses import dataclass

from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.core.request.sequence import Sequence
from scheduler_svc.core.request.timeline import Timeline

KEPT_REQUESTS = 1024


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A summary of a request that has ended, without tokens."""

    request_id: str
    reason: FinishReason
    message: str
    num_prompt_tokens: int
    num_output_tokens: int
    has_entered: bool  # a slot
    num_cached_tokens: int
    num_found_waiting: int  # prompt tokens that the cache held while it waited
    num_preemptions: int
    arrival_s: float
    ended_s: float
    timeline: Timeline


class Recent:
    """The last requests that ended, by id; of two with the same id the later one."""

    def __init__(self) -> None:
        self._by_id: dict[str, EndedRequest] = {}

    def note(self, sequence: Sequence, reason: FinishReason, message: str, now_s: float) -> None:
        """Adds a request that has ended."""
        request = sequence.request
        self._by_id.pop(request.request_id, None)  # keeps the dict ordered by end
        self._by_id[request.request_id] = EndedRequest(
            request_id=request.request_id,
            reason=reason,
            message=message,
            num_prompt_tokens=sequence.num_prompt,
            num_output_tokens=sequence.num_output,
            has_entered=sequence.has_run,
            num_cached_tokens=sequence.num_cached or 0,
            num_found_waiting=sequence.num_found_waiting,
            num_preemptions=sequence.num_preemptions,
            arrival_s=request.arrival_s,
            ended_s=max(now_s, request.arrival_s),
            timeline=sequence.timeline,
        )
        if len(self._by_id) > KEPT_REQUESTS:
            del self._by_id[next(iter(self._by_id))]

    def find(self, request_id: str) -> EndedRequest | None:
        """The latest ended request with this id; None when unknown or forgotten."""
        return self._by_id.get(request_id)
