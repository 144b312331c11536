"""The timed worker: its tokens are those of the workload, whatever is drafted or preempted."""

import numpy as np
import pytest

from scheduler_svc.core import Request, Scheduler, SchedulerConfig, StepPlan
from scheduler_svc.core.estimate.step_time import StepTime
from scheduler_svc.core.invariants import check_invariants
from scheduler_svc.core.step.plan import WorkerDraft
from simulator.capacity.draft_model import DraftedRow, VirtualDraftModel
from simulator.capacity.outputs import Outputs
from simulator.capacity.timed_worker import TimedWorker
from simulator.capacity.workload import Arrival, Recorded

CONFIG = SchedulerConfig(
    num_blocks=20,
    block_size=4,
    max_num_seqs=9,
    max_num_batched_tokens=64,
    max_model_len=64,
    vocab_size=100,
)
STEP_TIME = StepTime(1.0, 0.1, 0.01)


def arrivals(count: int, num_output: int) -> list[Arrival]:
    rng = np.random.default_rng(5)
    drawn = [rng.integers(0, 100, 8 + num_output, dtype=np.int32) for _ in range(count)]
    return [
        Arrival(0.0, 8, num_output, recorded=Recorded(tokens[:8], tokens[8:])) for tokens in drawn
    ]


class Served:
    def __init__(self, requests: list[Arrival], acceptance: float = 0.0) -> None:
        self.core = Scheduler(CONFIG)
        self.outputs = Outputs(CONFIG.vocab_size, acceptance)
        self.worker = TimedWorker(CONFIG, STEP_TIME, self.outputs)
        self.came: dict[int, list[int]] = {}
        for handle, arrival in enumerate(requests):
            assert arrival.recorded is not None
            self.outputs.add(arrival)
            prompt, most = arrival.recorded.prompt, arrival.output_tokens
            request = Request(str(handle), prompt, max_tokens=most, ignore_eos=True, handle=handle)
            self.core.add(request)

    def plan(self, length: int = 0) -> StepPlan | None:
        """The next step, in which as many of each row's drafts come true as are foreseen."""
        slots = [s.slot for s in self.core.view.running if s.slot is not None and length]
        return self.core.schedule(None, {slot: WorkerDraft(length) for slot in slots})

    def answer(self, plan: StepPlan) -> float:
        step = self.worker.step(plan)
        outputs = self.core.update(step.result)
        check_invariants(self.core)
        for handle, token_id in zip(outputs.handles, outputs.token_ids, strict=True):
            self.came.setdefault(int(handle), []).append(int(token_id))
        return step.duration_s


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("length", [0, 1, 3])
def test_each_request_gets_its_own_output_through_drafts_and_preemptions(
    acceptance: float, length: int
) -> None:
    requests = arrivals(count=4, num_output=30)
    served = Served(requests, acceptance)
    while any(served.core.live()):
        plan = served.plan(length)
        assert plan is not None
        served.answer(plan)
    assert served.core.view.num_preemptions > 0
    for handle, arrival in enumerate(requests):
        assert arrival.recorded is not None
        assert served.came[handle] == arrival.recorded.output.tolist()


def test_a_row_advances_up_to_the_first_draft_that_is_wrong() -> None:
    (only,) = requests = arrivals(count=1, num_output=10)
    assert only.recorded is not None
    served, true = Served(requests), only.recorded.output.tolist()
    for drafted, num_right in (([], 0), (true[1:3], 2), ([true[4], -1, true[6]], 1), ([-1], 0)):
        drafts = {0: np.array(drafted, dtype=np.int32)} if drafted else {}
        plan = served.core.schedule(None, drafts)
        assert plan is not None
        before = len(served.came.get(0, []))
        served.answer(plan)
        assert served.came[0][before:] == true[before : before + num_right + 1]


def test_a_step_takes_the_time_of_its_drafts_and_of_what_each_of_them_reads() -> None:
    served = Served(arrivals(count=1, num_output=10))
    times_s = []
    for length in (0, 0, 2):
        plan = served.plan(length)
        assert plan is not None
        times_s.append(served.answer(plan))
    # A prompt of 8 tokens; one token after them; a token and two drafts after 9.
    assert times_s == pytest.approx([1.8, 1 + 0.1 + 0.08, 1 + 0.3 + 0.27])


def test_the_draft_model_reads_what_it_lacks_and_then_drafts_token_by_token() -> None:
    model = VirtualDraftModel(CONFIG, STEP_TIME)
    # 8 tokens are read, then one is drafted after them and one after that.
    first_s = model.draft([DraftedRow(0, 8, 3, 1)])
    assert first_s == pytest.approx((1 + 0.8) + (1 + 0.1 + 0.08) + (1 + 0.1 + 0.09))
    # It has read the one that was accepted: a token is left to read.
    assert model.draft([DraftedRow(0, 10, 1, 0)]) == pytest.approx(1 + 0.1 + 0.09)
    # Two passes for more tokens than a step has, and another slot's length of its own.
    model.enter(0)
    both = [DraftedRow(0, 60, 1, 0), DraftedRow(1, 10, 2, 0)]
    assert model.draft(both) == pytest.approx((2 + 7.0) + (1 + 0.1 + 0.1))


def test_whether_a_token_is_foreseen_depends_on_its_place_alone() -> None:
    (only,) = requests = arrivals(count=1, num_output=56)
    outputs = Outputs(CONFIG.vocab_size, 0.5, seed=7)
    outputs.add(only)
    whole = outputs.foresee(0, 0, 56)
    pieces = [outputs.foresee(0, begin, 8) for begin in range(0, 56, 8)]
    assert np.concatenate(pieces).tolist() == whole.tolist()
    is_right = whole == outputs.of(0)
    assert 15 < is_right.sum() < 41 and len(outputs.foresee(0, 55, 4)) == 1
    assert requests[0].output_tokens == 56
