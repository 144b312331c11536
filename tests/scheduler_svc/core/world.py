"""The state that all rules act on: a scheduler with clients and workers.

A rule is one thing that can happen. It leaves choices to a Draw, so that the same rules serve
hypothesis, which searches for a short failing case, and the soak, which runs long ones.
"""

import hashlib
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scheduler_svc.core import (
    GRAMMAR,
    CachePolicy,
    Cut,
    KvGroup,
    Policy,
    Preemption,
    RefusalKind,
    Refused,
    Request,
    RequirementKind,
    SchedulerConfig,
    Sequence,
    SessionHint,
    Status,
    StepPlan,
)
from scheduler_svc.core.request.request import Extras
from tests.scheduler_svc.core.draws import Draw
from tests.scheduler_svc.core.granting import Granting

VOCAB_SIZE = 40
PREPARED_KINDS: list[tuple[RequirementKind, ...]] = [
    (GRAMMAR.kind,),
    (GRAMMAR.kind,),
    (),
    (RequirementKind.ADAPTER,),
    tuple(RequirementKind),
]

SESSION_HINTS = [  # few names, so that sessions meet; by number, so that no draw changes
    None,
    SessionHint("a"),
    SessionHint("b", "a"),
    SessionHint(ttl_s=0.5),
    SessionHint("a", ttl_s=0.0),
    SessionHint("b", ttl_s=30.0),
    SessionHint("a", "a"),
]


def draw_config(draw: Draw) -> SchedulerConfig:
    """Small random limits, so that all of them are reached often."""
    max_num_seqs, groups = draw.integer(1, 6), draw_groups(draw)
    has_states = draw.pick([False, False, True])
    preemption = Preemption.RECOMPUTE if has_states else draw.pick(list(Preemption))
    num_blocks = draw.integer(3, 24 * max(len(groups), 1))
    return SchedulerConfig(
        num_blocks=num_blocks,
        block_size=groups[0].block_size if groups else draw.integer(1, 4),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw.integer(max_num_seqs, 24),
        max_model_len=draw.integer(8, 48),
        vocab_size=VOCAB_SIZE,
        eos_token_ids=draw.pick([(), (0,), (0, 1)]),
        long_prefill_token_threshold=draw.pick([0, 0, 1, 5]),
        enable_prefix_caching=draw.pick([True, True, True, False]),
        kv_groups=groups,
        has_states=has_states,
        num_state_snapshots=draw.integer(0, 9) if has_states else 0,
        state_interval=draw.pick([1, 4, 9]),
        preemption=preemption,
        num_host_blocks=draw.integer(0, 24),
        policy=draw.pick(list(Policy)),
        cache_policy=draw.pick(list(CachePolicy)),
        priority_ageing_s=draw.pick([0.5, 4.0]),
        tenant_weights=(("a", 2.0),),
        queue_window=draw.pick([0, 1, 4]),
        max_overtakes=draw.pick([0, 1, 3]),
        prepared_kinds=draw.pick(PREPARED_KINDS),
        keeps_pictures_whole=num_blocks % 3 == 0,
        max_waiting_requests=draw.pick([0, 0, 3]),
        max_waiting_tokens=draw.pick([0, 0, 60]),
        max_waiting_requests_per_tenant=draw.pick([0, 0, 2]),
        max_waiting_tokens_per_tenant=draw.pick([0, 0, 40]),
    )


def draw_groups(draw: Draw) -> tuple[KvGroup, ...]:
    """One group, with a window or without, or several, whose blocks are of different sizes."""
    num_groups = draw.pick([0, 0, 0, 1, 2, 2, 3])
    sizes = draw.pick([(4, 8, 4), (1, 2, 4), (2, 2, 2), (2, 3, 1), (3, 1, 2)])
    windows = [draw.pick([None, 2, 3, 5, 10]) for _ in range(num_groups)]
    return tuple(map(KvGroup, sizes, windows))


class World(Granting):
    """A simulation with its look-ahead and whether it has a worker."""

    def __init__(self, config: SchedulerConfig, max_depth: int) -> None:
        super().__init__(config)
        self.max_depth = max_depth  # steps planned beyond the one awaited
        self.is_worker_away = False
        self.num_refused = 0
        self.plans = hashlib.sha256()  # of every plan: equal runs have equal digests
        self.cut_asked: Cut | None = None
        self.first_left_out: int | None = None  # the worker's answer, not delivered yet

    # --- requests --------------------------------------------------------------------------------

    def draw_prompt(self, draw: Draw, low: int, high: int) -> list[int]:
        """Tokens of one of two families that differ in the first token, or in the last."""
        length = draw.integer(low, min(high, self.config.max_model_len - 1))
        family = draw.integer(0, 2)
        prompt = [(position * 7 + family % 2) % VOCAB_SIZE for position in range(length)]
        if family == 2:
            prompt[-1] = draw.integer(0, VOCAB_SIZE - 1)
        return prompt

    def submit(self, prompt: list[int], **fields: object) -> Sequence | None:
        """Submits a valid request; None when it is refused for a reason that is checked."""
        prompt = prompt[: self.config.max_model_len - 1]
        handle = len(self.requests)
        told = SESSION_HINTS[handle % len(SESSION_HINTS)]
        defaults = {"max_tokens": 6, "arrival_s": self.scheduler.now_s, "session": told}
        fields = defaults | fields
        if handle % 11 == 0:
            self.scheduler.end_session("a", str(fields.get("cache_salt", "")))
        token_ids = np.array(prompt, dtype=np.int32)
        if self.config.keeps_pictures_whole and "extras" in fields:
            fields["extras"] = self._within_a_step(fields["extras"])
        request = Request(f"r{handle}", token_ids, handle=handle, **fields)  # type: ignore[arg-type]
        try:
            return self.add(request)
        except Refused as refused:
            self._check_refusal(request, refused)
            self.num_refused += 1
            self.check()
            return None

    def _within_a_step(self, extras: Any) -> Extras:
        """Pictures that one step can compute."""
        most = self.config.max_num_batched_tokens
        return tuple(replace(one, end=min(one.end, one.begin + most)) for one in extras)

    def _check_refusal(self, request: Request, refused: Refused) -> None:
        config, num_usable = self.config, self.scheduler.internal_state.pool.num_usable
        if refused.kind is RefusalKind.NEVER_FITS:
            longest = config.max_model_len
            if request.max_tokens is not None:
                num_tokens = max(request.max_tokens, 1)  # an end without a sample needs room, too
                longest = min(longest, len(request.prompt_token_ids) + num_tokens)
            assert config.blocks_needed(longest) > num_usable, refused
        else:
            assert refused.kind is RefusalKind.OVERLOADED, refused
            assert len(self.scheduler.internal_state.waiting), "an empty queue takes anything"

    def live_in(self, *statuses: Status) -> list[str]:
        """Ids of the requests with one of these statuses."""
        return [s.request.request_id for s in self.scheduler.live() if s.status in statuses]

    # --- steps -----------------------------------------------------------------------------------

    @property
    def may_plan(self) -> bool:
        """True if a shell would plan another step now."""
        return not self.is_worker_away and self.scheduler.num_in_flight <= self.max_depth

    def settle(self) -> None:
        """Attaches a worker, finishes all requests, and checks that nothing is left."""
        self.scheduler.migration.reopen()
        if self.is_worker_away:
            self.bring_worker_back()
        if self.cut_asked is not None:
            self.answer_cut()
            self.hear_of_cut()
        while self.not_begun:
            self.begin()
        self.drain(self.max_depth)
        scheduler = self.scheduler
        assert scheduler.internal_state.pool.num_free == scheduler.internal_state.pool.num_usable
        if (snapshots := scheduler.internal_state.snapshots) is not None:
            assert snapshots.pool.num_free == snapshots.num_snapshots
        assert len(self.ends) == len(self.requests) == scheduler.num_finished
        brought = [r.output_token_ids for r in self.requests if r.output_token_ids is not None]
        num_outputs = sum(map(len, self.outputs)) - sum(map(len, brought))
        assert scheduler.num_output_tokens == num_outputs
        assert not len(scheduler.internal_state.waiting) and scheduler.next_deadline_s is None

    def answer_cut(self) -> None:
        """The worker skips the steps that it has not begun, unless it did so before."""
        assert self.cut_asked is not None
        if self.first_left_out is None:
            self.first_left_out = self.leave_out(self.cut_asked)

    def hear_of_cut(self) -> None:
        """Delivers the answer to a cut."""
        assert self.cut_asked is not None and self.first_left_out is not None
        cut, first, self.cut_asked, self.first_left_out = (
            *(self.cut_asked, self.first_left_out), None, None,
        )  # fmt: skip
        self.skip(first, cut)

    def send_worker_away(self, is_death: bool = False) -> None:
        super().send_worker_away(is_death)
        self.is_worker_away = True
        self.cut_asked = self.first_left_out = None

    def bring_worker_back(
        self,
        num_blocks: int | None = None,
        num_host_blocks: int | None = None,
        num_state_snapshots: int | None = None,
    ) -> None:
        super().bring_worker_back(num_blocks, num_host_blocks, num_state_snapshots)
        self.is_worker_away = False

    def _check_plan(self, plan: StepPlan, in_flight: list[StepPlan]) -> None:
        super()._check_plan(plan, in_flight)
        assert sum(s.is_suspect for s in plan.sequences()) <= 1, "suspects share a step"
        entered = [(new.slot, new.block_ids, new.group_block_ids) for new in plan.new_sequences]
        rows = plan.slots.tolist(), plan.num_computed.tolist(), plan.sampled_slots.tolist()
        gained = plan.appended_block_ids, plan.appended_to_groups
        told = plan.step_id, rows, entered, gained, plan.preempted, plan.state_saves
        self.plans.update(repr(told).encode())

    # --- calls that change nothing ---------------------------------------------------------------

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Asserts that the block leaves the scheduler unchanged."""
        before = pickle.dumps(self.scheduler)
        yield
        assert pickle.dumps(self.scheduler) == before, "it left a trace"


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: an action, its weight in a soak, and when it is possible."""

    name: str
    weight: float
    apply: Callable[[World, Draw], None]
    is_possible: Callable[[World], bool]


RULES: dict[str, Rule] = {}


def rule(
    weight: float, when: Callable[[World], bool] = lambda _: True
) -> Callable[[Callable[[World, Draw], None]], Callable[[World, Draw], None]]:
    """Registers a function as a rule under its own name."""

    def register(apply: Callable[[World, Draw], None]) -> Callable[[World, Draw], None]:
        assert apply.__name__ not in RULES
        RULES[apply.__name__] = Rule(apply.__name__, weight, apply, when)
        return apply

    return register
