"""The draft model is asked where it pays, by measured steps and by what came true."""

import numpy as np
import pytest

from scheduler_svc.core import GRAMMAR, Request, Scheduler, SchedulerConfig, StepPlan, StepResult
from scheduler_svc.speculation.answered_step import AnsweredStep
from scheduler_svc.speculation.model_drafter import ModelDrafter
from scheduler_svc.speculation.options import Method, SpeculationOptions

OPTIONS = SpeculationOptions(Method.DRAFT_MODEL, 4)


class Served:
    """A core whose worker accepts so many drafts of each row, and takes a given time for them."""

    def __init__(self, num_right: int, draft_s: float, lag_s: float = 0.0) -> None:
        self.core = Scheduler(
            SchedulerConfig(
                num_blocks=800,
                block_size=16,
                max_num_seqs=8,
                max_num_batched_tokens=4096,
                max_model_len=4096,
                vocab_size=100,
            )
        )
        self.drafter = ModelDrafter(OPTIONS, self.core)
        self.num_right, self.draft_s, self.lag_s = num_right, draft_s, lag_s
        self.drafted: list[int] = []  # by step
        self.num_read: dict[int, int] = {}  # by slot, tokens that the draft model has computed

    def add(self, name: str, num_prompt: int = 20, max_tokens: int = 3000, **more: object) -> None:
        prompt = np.arange(num_prompt, dtype=np.int32) % 90
        self.core.add(Request(name, prompt, max_tokens=max_tokens, **more))  # type: ignore[arg-type]

    def step(self) -> StepPlan:
        plan = self.plan()
        assert plan is not None
        self.answer(plan)
        return plan

    def plan(self) -> StepPlan | None:
        drafts = self.drafter.propose()
        return None if drafts is None else self.core.schedule(None, drafts)

    def answer(self, plan: StepPlan) -> None:
        counts, seconds = [], 1.0
        for slot, computed in zip(plan.slots.tolist(), plan.num_computed.tolist(), strict=True):
            drafted = len(plan.drafts.get(slot, ()))
            if drafted:
                seconds += self.lag_s * (computed - self.num_read.get(slot, 0))
                self.num_read[slot] = computed + min(self.num_right, drafted - 1) + 1
            counts.append(1 + min(self.num_right, drafted))
        longest = max(map(len, plan.drafts.values()), default=0)
        num_sampled = np.array(counts, dtype=np.int32)
        tokens = np.full(num_sampled.sum(), 99, dtype=np.int32)
        self.core.update(StepResult(plan.step_id, tokens, num_sampled=num_sampled))
        seconds += longest * self.draft_s
        self.drafter.stepped(AnsweredStep(plan, seconds, seconds, len(tokens)))
        self.drafted.append(longest)

    def run(self, num_steps: int) -> list[int]:
        """Drafts of the longest row in each of so many steps."""
        begin = len(self.drafted)
        for _ in range(num_steps):
            if any(self.core.live()):
                self.step()
        return self.drafted[begin:]


def test_a_quick_draft_model_is_asked_for_all_that_is_allowed() -> None:
    served = Served(4, 0.1)
    served.add("a")
    assert served.run(100).count(4) > 90


def test_a_slow_draft_model_takes_a_small_share_of_the_time() -> None:
    served = Served(1, 1.0)
    served.add("a")
    served.run(20)
    drafted = served.run(2000)
    assert 2 <= sum(map(bool, drafted)) < 10


def test_a_step_with_drafts_is_alone_and_tries_end() -> None:
    served = Served(0, 0.5)
    served.add("a")
    served.add("b")
    in_flight: list[StepPlan] = []
    for _ in range(2000):
        while len(in_flight) < 2 and (plan := served.plan()) is not None:
            in_flight.append(plan)
        assert len(in_flight) == 1 or not any(plan.drafts for plan in in_flight)
        served.answer(in_flight.pop(0))
    assert 2 <= sum(map(bool, served.drafted[200:])) < 30


def test_where_places_are_few_all_rows_get_as_many_drafts() -> None:
    served = Served(4, 0.1)
    for name in "abc":
        served.add(name)
    served.run(100)
    plans = [served.step() for _ in range(50)]
    # Eight tokens are sampled at most, so there are five drafts of three rows.
    lengths = {tuple(map(len, plan.drafts.values())) for plan in plans if plan.drafts}
    assert lengths == {(1, 1, 1)}


def test_a_slow_draft_model_reads_hardly_any_prompt() -> None:
    served = Served(4, 1.0, lag_s=0.02)
    for number in range(20):
        served.add(str(number), num_prompt=200, max_tokens=50)
        served.run(45)
        served.core.abort(str(number))
        while (plan := served.core.release()) is not None:
            served.core.update(StepResult(plan.step_id, np.zeros(0, dtype=np.int32)))
    assert sum(map(bool, served.drafted)) < 10


def test_drafts_are_as_long_as_they_come_true() -> None:
    served = Served(1, 0.2)
    served.add("a")
    served.run(60)
    lengths = served.run(60)
    assert max(set(lengths), key=lengths.count) in (1, 2)


def test_a_first_measurement_that_was_wrong_is_put_right() -> None:
    served = Served(4, 1.5)
    served.add("a")
    served.run(10)
    served.draft_s = 0.05
    assert served.run(1300)[-10:].count(4) > 5


def test_a_plain_step_is_made_now_and_then() -> None:
    served = Served(4, 0.1)
    served.add("a")
    served.run(50)
    assert 1 <= served.run(200).count(0) <= 8


def test_a_long_prompt_is_not_read_for_a_few_tokens() -> None:
    served = Served(4, 0.1, lag_s=0.05)
    served.add("a", num_prompt=400)
    served.run(30)
    served.add("short", num_prompt=1500, max_tokens=10)
    plans = [served.step() for _ in range(10)]
    slot = plans[0].new_sequences[0].slot
    assert not any(slot in plan.drafts for plan in plans)
    assert served.run(20).count(4) > 10


@pytest.mark.parametrize("limit", [1, 2])
def test_a_batch_of_the_size_that_disables_it_has_no_drafts(limit: int) -> None:
    served = Served(4, 0.1)
    options = SpeculationOptions(Method.DRAFT_MODEL, 4, disable_by_batch_size=limit)
    served.drafter = ModelDrafter(options, served.core)
    served.add("a")
    assert any(served.run(10)) is (limit > 1)


def test_a_request_with_a_grammar_is_not_drafted_for() -> None:
    served = Served(4, 0.1)
    served.add("ruled", requirements=(GRAMMAR,))
    assert not any(served.run(50))
