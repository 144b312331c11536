"""A server under a virtual clock: steps take what they took of 8B on an H200.

The production core and drafter, with look-ahead. What comes true is drawn once for each request and
place, so every number here is computed, the same on any machine.
"""

from collections import deque
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core import Drafts, Request, Scheduler, SchedulerConfig, Sequence, StepPlan
from scheduler_svc.core.request.request import TokenIds
from scheduler_svc.speculation.answered_step import AnsweredStep
from scheduler_svc.speculation.drafter import Drafter
from scheduler_svc.speculation.options import Method, SpeculationOptions
from scheduler_svc.speculation.start import Drafting
from tests.scheduler_svc.speculation.answers import TOKEN, answer

OPTIONS = SpeculationOptions(Method.NGRAM, 7)
NUM_PROMPT, NUM_OUTPUT, LOOKAHEAD = 20, 160, 1
POSITIONS, MILLISECONDS = (1, 8, 64, 128, 256), (4.0, 4.65, 6.3, 8.4, 12.2)
VERIFY_S, WIRE_S, HOST_S = 0.5e-3, 0.2e-3, 0.15e-3  # of drafts; each way; from answer to plan
UNFORESEEN = 0.1  # share of predictions that come true

Right = list[NDArray[np.bool_]]  # by request: which predictions come true, by place


def foreseen(num_requests: int, share: float, right: float) -> Right:
    """Predictions of a share of the requests come true so often; of the others, hardly."""
    random = np.random.default_rng(0)
    is_foreseen = random.permutation(num_requests) < share * num_requests
    rates = np.where(is_foreseen, right, UNFORESEEN)
    return [random.random(NUM_OUTPUT + 64) < rate for rate in rates]


def in_passages(num_requests: int, foreseen_tokens: int, other_tokens: int) -> Right:
    """Each request has passages that are foreseen and others that are not."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(num_requests):
        rates: list[float] = []
        while len(rates) < NUM_OUTPUT + 64:
            rates += [0.95] * random.geometric(1 / foreseen_tokens)
            rates += [UNFORESEEN] * random.geometric(1 / other_tokens)
        at = random.integers(len(rates))
        found.append(random.random(NUM_OUTPUT + 64) < np.roll(rates, at)[: NUM_OUTPUT + 64])
    return found


@dataclass(slots=True)
class Server:
    """A scheduler's loop and its worker."""

    num_requests: int
    right: Right | None  # None: there are no drafts
    now_s: float = 0.0
    free_at_s: float = 0.0
    answered_s: float = 0.0
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))
    coming: deque[tuple[float, float, StepPlan]] = field(default_factory=deque)
    core: Scheduler = field(init=False)
    drafter: Drafting | None = field(init=False)
    predicted: list[TokenIds] = field(init=False)  # by request

    def __post_init__(self) -> None:
        limits = {"num_blocks": 4000, "block_size": 16, "max_num_seqs": 256, "max_model_len": 512}
        self.core = Scheduler(
            SchedulerConfig(max_num_batched_tokens=4096, vocab_size=100, **limits)
        )
        self.drafter = None if self.right is None else self.make_drafter()
        tokens = np.array([TOKEN + 1, TOKEN], dtype=np.int32)
        self.predicted = [tokens[right.astype(np.intp)] for right in self.right or ()]

    def make_drafter(self) -> Drafting:
        return Drafter(OPTIONS, self.core, self._predict)

    def drafts_of(self, plan: StepPlan) -> Drafts:
        return plan.drafts

    def draft_s(self, plan: StepPlan) -> float:
        """Seconds to make the drafts of a step, in the step."""
        return 0.0

    def serve(self, num_streams: int) -> list[float]:
        """Answers all requests, so many at a time; returns when each one ended."""
        waiting, ends_s = deque(range(self.num_requests)), [0.0] * self.num_requests
        began_s = self.now_s
        for _ in range(num_streams):
            self._add(waiting.popleft())
        while any(self.core.live()):
            self._plan()
            for handle in self._answer():
                ends_s[handle] = self.now_s - began_s
                if waiting:
                    self._add(waiting.popleft())
        return ends_s

    def _predict(self, sequence: Sequence, num_known: int) -> TokenIds:
        at = num_known - sequence.num_prompt
        predicted = self.predicted[sequence.request.handle]
        return predicted[at : at + OPTIONS.num_speculative_tokens]

    def _add(self, handle: int) -> None:
        prompt = np.arange(NUM_PROMPT, dtype=np.int32) + 10
        name = f"{handle} at {self.now_s}"
        self.core.add(Request(name, prompt, max_tokens=NUM_OUTPUT, handle=handle))

    def _plan(self) -> None:
        while True:
            drafts = {} if self.drafter is None else self.drafter.propose()
            if drafts is None or self.core.num_in_flight > LOOKAHEAD:
                return
            plan = self.core.schedule(None, drafts)
            if plan is None:
                return
            took_s = float(np.interp(plan.num_tokens, POSITIONS, MILLISECONDS)) * 1e-3
            if plan.drafts:
                took_s += VERIFY_S + self.draft_s(plan)
            took_s *= self.random.uniform(0.98, 1.02)
            self.free_at_s = max(self.now_s + WIRE_S, self.free_at_s) + took_s
            self.coming.append((self.now_s, self.free_at_s + WIRE_S, plan))

    def _answer(self) -> list[int]:
        sent_s, now_s, plan = self.coming.popleft()
        result, num_tokens = answer(self.core, plan, self.drafts_of(plan))
        if self.drafter is not None:
            duration_s, period_s = now_s - max(sent_s, self.answered_s), now_s - self.answered_s
            self.drafter.stepped(AnsweredStep(plan, duration_s, period_s, num_tokens))
        self.answered_s, self.now_s = now_s, now_s + HOST_S
        return [finished.request.handle for finished in result.finished]


def gains(right: Right, num_streams: int, made: type[Server] = Server) -> list[float]:
    """The factors by which requests end sooner, once steps were measured; the last is of all."""
    off_s = ends_without_drafts(len(right), num_streams)
    on_s = ends(made(len(right), right), num_streams)
    return [off / on for off, on in zip(off_s, on_s, strict=True)]


@cache
def ends_without_drafts(num_requests: int, num_streams: int) -> list[float]:
    """Nothing depends on what comes true, so it is computed once for each number of requests."""
    return ends(Server(num_requests, None), num_streams)


def ends(server: Server, num_streams: int) -> list[float]:
    """When each request ends, once steps were measured, and when the last one does."""
    server.serve(num_streams)
    found = server.serve(num_streams)
    return [*found, max(found)]
