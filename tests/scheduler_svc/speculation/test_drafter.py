"""Rows get on as without drafts where these do not pay, else quicker. In virtual time."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from scheduler_svc.core import Request, Scheduler, SchedulerConfig, Sequence, StepPlan
from scheduler_svc.core.request.request import TokenIds
from scheduler_svc.core.step.plan import NO_DRAFTS
from scheduler_svc.speculation.answered_step import AnsweredStep
from scheduler_svc.speculation.drafter import Drafter
from scheduler_svc.speculation.options import Method, SpeculationOptions
from tests.scheduler_svc.speculation.answers import TOKEN, answer

OPTIONS = SpeculationOptions(Method.NGRAM, 7)
NUM_PROMPT, NUM_OUTPUT = 20, 160


@dataclass(slots=True)
class Device:
    """Times of a step, as measured on an H200 with 8B, in milliseconds."""

    rows_ms: float = 6.2  # of 64 rows
    token_ms: float = 0.03  # of each draft
    awaited_ms: float = 5.0  # from the answer of a step with drafts to the next step
    right: float = 0.7  # share of predictions that come true
    elapsed_s: float = 0.0
    num_tokens: int = 0
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def predict(self, _: Sequence, __: int) -> TokenIds:
        right = self.random.random(OPTIONS.num_speculative_tokens) < self.right
        return np.where(right, TOKEN, TOKEN + 1).astype(np.int32)

    def answer(self, core: Scheduler, drafter: Drafter | None, plan: StepPlan) -> None:
        result, _ = answer(core, plan)
        num_drafted = sum(map(len, plan.drafts.values()))
        milliseconds = self.rows_ms + self.token_ms * num_drafted
        milliseconds += self.awaited_ms * bool(num_drafted)
        seconds = milliseconds * 1e-3 * self.random.uniform(0.97, 1.03)
        self.elapsed_s += seconds
        self.num_tokens += len(result.token_ids)
        if drafter is not None:
            drafter.stepped(AnsweredStep(plan, seconds, seconds, len(result.token_ids)))


def pace(device: Device, num_rows: int, num_rounds: int, drafts: bool) -> float:
    """Tokens a second of the last round of requests that all come at once."""
    limits = {"num_blocks": 4000, "block_size": 16, "max_num_seqs": 512, "max_model_len": 512}
    core = Scheduler(SchedulerConfig(max_num_batched_tokens=4096, vocab_size=100, **limits))
    drafter = Drafter(OPTIONS, core, device.predict) if drafts else None
    for number in range(num_rounds):
        device.elapsed_s, device.num_tokens = 0.0, 0
        for row in range(num_rows):
            prompt = np.arange(NUM_PROMPT, dtype=np.int32) + 10
            name, most = f"{number}-{row}", NUM_OUTPUT - row % 16 * 4
            core.add(Request(name, prompt, max_tokens=most))
        while any(core.live()):
            proposed = drafter.propose() if drafter else NO_DRAFTS
            assert proposed is not None
            plan = core.schedule(None, proposed)
            assert plan is not None
            device.answer(core, drafter, plan)
    return device.num_tokens / device.elapsed_s


@pytest.mark.parametrize("right", [0.3, 0.6, 0.7])
@pytest.mark.parametrize("awaited_ms", [5.0, 12.0])
def test_drafts_that_do_not_pay_cost_little(right: float, awaited_ms: float) -> None:
    plain = pace(Device(), 64, 2, drafts=False)
    drafted = pace(Device(awaited_ms=awaited_ms, token_ms=0.06, right=right), 64, 2, drafts=True)
    assert drafted > 0.97 * plain


def test_drafts_that_pay_are_made() -> None:
    plain = pace(Device(rows_ms=3.8), 1, 2, drafts=False)
    drafted = pace(Device(rows_ms=3.8, token_ms=0.2, awaited_ms=1.5, right=0.9), 1, 2, drafts=True)
    assert drafted > 2.0 * plain


def test_one_disturbed_step_does_not_end_drafts_for_ever() -> None:
    device = Device(rows_ms=3.8, token_ms=0.2, awaited_ms=1000.0, right=0.9)

    def settle(self: Device, core: Scheduler, drafter: Drafter | None, plan: StepPlan) -> None:
        answer(self, core, drafter, plan)
        if plan.drafts:
            self.awaited_ms = 1.5

    answer, plain = Device.answer, pace(Device(rows_ms=3.8), 1, 2, drafts=False)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Device, "answer", settle)
        assert pace(device, 1, 40, drafts=True) > 2.0 * plain


def test_outputs_are_kept_for_others_also_while_drafts_rest() -> None:
    options = SpeculationOptions(Method.SUFFIX, 4, suffix_decoding_max_cached_requests=8)
    limits = {"num_blocks": 100, "block_size": 16, "max_num_seqs": 4, "max_model_len": 256}
    core = Scheduler(SchedulerConfig(max_num_batched_tokens=256, vocab_size=100, **limits))
    drafter = Drafter(options, core)
    drafter._lengths = lambda _: []  # type: ignore[method-assign]
    core.add(Request("a", np.arange(20, dtype=np.int32), max_tokens=30))
    device = Device()
    while any(core.live()):
        proposed = drafter.propose()
        assert proposed is not None
        plan = core.schedule(None, proposed)
        assert plan is not None and not plan.drafts
        device.answer(core, drafter, plan)
    other = Request("b", np.arange(20, dtype=np.int32), max_tokens=30)
    core.add(other)
    drafter.propose()
    assert drafter._past.of(other).tolist().count(TOKEN) >= 30
