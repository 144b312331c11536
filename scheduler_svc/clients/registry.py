"""Sorts the results of steps into the outboxes of the client streams, by client number."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from scheduler_svc.clients.outbox import Admitted, Outbox, RequestEnd
from scheduler_svc.core import Finished, FinishReason, StepOutputs, StepPlan
from scheduler_svc.core.request.fault import RequestFault, blaming
from scheduler_svc.core.step.plan import PromptOutputDelivery
from scheduler_svc.metrics.counts import SchedulerCounts
from scheduler_svc.observe.request_spans import RequestSpans
from wire.logprobs import LogprobColumns
from wire.logs.request import LoggedRequest
from wire.prompt_outputs import PromptOutput

log = logging.getLogger("scheduler_svc.requests")

_STATUS_CODES = {  # gRPC status codes
    FinishReason.ERROR: 13,
    FinishReason.EXPIRED: 4,
    FinishReason.DEAD_END: 3,
    FinishReason.POISON: 10,
}


class Clients:
    """Delivers tokens, admissions and ends by client, and counts the ends.

    Drops those of clients that have left.
    """

    def __init__(
        self, counts: SchedulerCounts | None = None, spans: RequestSpans | None = None
    ) -> None:
        self.counts = counts or SchedulerCounts()
        self.spans = spans or RequestSpans()
        self._outboxes: dict[int, Outbox] = {}
        self._newest = 0

    def open(self) -> tuple[int, Outbox]:
        """Returns the number and the outbox of a new client."""
        self._newest += 1
        self._outboxes[self._newest] = outbox = Outbox()
        return self._newest, outbox

    def close(self, client: int) -> None:
        """Removes a client."""
        del self._outboxes[client]

    def deliver(
        self,
        outputs: StepOutputs,
        logprobs: LogprobColumns | None,
        prompt_outputs: Sequence[PromptOutput] = (),
    ) -> None:
        """Delivers a step's outputs. Rows of `logprobs` index the tokens of the step's result.

        Raises RequestFault, with all else delivered, for a prompt's outputs that cannot be.
        """
        failed = self._tell_prompt_outputs(outputs.prompt_outputs, prompt_outputs)
        clients, handles, token_ids = outputs.clients, outputs.handles, outputs.token_ids
        if logprobs is not None and outputs.sampled_rows is not None:
            logprobs = logprobs.select(outputs.sampled_rows)
        if len(clients):
            first = int(clients[0])
            if (clients == first).all():  # one gateway: the usual case
                self._tell_tokens(first, handles, token_ids, logprobs)
            else:
                for client in np.unique(clients).tolist():
                    rows = np.flatnonzero(clients == client)
                    own = None if logprobs is None else logprobs.select(rows)
                    self._tell_tokens(client, handles[rows], token_ids[rows], own)
        self.tell_ends(outputs.finished)
        if failed is not None:
            raise failed

    def _tell_prompt_outputs(
        self, deliveries: Iterable[PromptOutputDelivery], prompt_outputs: Sequence[PromptOutput]
    ) -> RequestFault | None:
        """Delivers what was found out about prompts; returns why one request missed its own."""
        failed: RequestFault | None = None
        for delivery in deliveries:
            outbox = self._outboxes.get(delivery.request.client)
            if outbox is None:
                continue
            try:
                with blaming(delivery.request.request_id):
                    told = replace(prompt_outputs[delivery.row], owner=delivery.request.handle)
            except RequestFault as fault:
                failed = fault
            else:
                outbox.put_prompt_output(told)
        return failed

    def _tell_tokens(
        self,
        client: int,
        handles: np.ndarray[tuple[int], np.dtype[np.uint32]],
        token_ids: np.ndarray[tuple[int], np.dtype[np.int32]],
        logprobs: LogprobColumns | None,
    ) -> None:
        outbox = self._outboxes.get(client)
        if outbox is not None:
            outbox.put_tokens(handles, token_ids, logprobs)

    def tell_admitted(self, plan: StepPlan) -> None:
        """Reports the requests admitted by this step to their clients."""
        for new in plan.new_sequences:
            outbox = self._outboxes.get(new.request.client)
            if outbox is not None:
                outbox.put_admission(Admitted(new.request.handle, new.num_first_cached_tokens))

    def note_end(self, end: Finished) -> None:
        """Counts an end, and tells of it in log and trace."""
        self.counts.ended(end)
        if log.isEnabledFor(logging.DEBUG):
            request_id = end.request.request_id
            about = LoggedRequest(request_id, self.spans.trace_id(request_id))
            log.debug("a request ended: %s", end.reason.value, extra=about.extra)
        if self.spans.contexts:
            self.spans.ended(end)

    def tell_ends(self, finished: Iterable[Finished]) -> None:
        """Reports finished requests, with the reason, after all their tokens."""
        for end in finished:
            self.note_end(end)
            outbox = self._outboxes.get(end.request.client)
            if outbox is not None:
                outbox.put_end(RequestEnd(end, _STATUS_CODES.get(end.reason, 0)))
