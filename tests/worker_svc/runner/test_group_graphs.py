"""Graphs of a model with several KV groups, interpreted, give the tokens of the eager runner.

Pages of windows are given to other sequences as soon as no later token reads them, and are NaN in
between, as a scheduler's free pages may be.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.worker_svc.runner.interpreted import CPU, launching, needs_interpreter, use_few_splits
from tests.worker_svc.runner.test_batch_state import column
from tests.worker_svc.transformers_models.families import VOCAB_SIZE, WINDOW, write
from worker_svc.attention.page_cache import PageCache
from worker_svc.config import WorkerConfig
from worker_svc.models import Decoder, compiled, linear
from worker_svc.models.step_model import StepModel
from worker_svc.protocol.step import GroupBlocks, Limits, NewSequence, RowSampling, StepInput
from worker_svc.runner.eager_runner import EagerRunner
from worker_svc.runner.model_runner import ModelRunner
from worker_svc.startup import startup
from worker_svc.transformers_models.attention import KernelAttention
from worker_svc.transformers_models.model import TransformersModel, TransformersStack

pytestmark = [
    *needs_interpreter,
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]

CONTEXT, NUM_PAGES = 40, 45
DRAWN = RowSampling(temperature=1.2, seed=4)
ASKING = RowSampling(presence_penalty=0.9, logit_bias=((5, 2.0),), num_top_logprobs=2)
FILTERED = RowSampling(temperature=1.1, top_k=7, seed=2)
SAMPLINGS = [RowSampling(), DRAWN, ASKING, FILTERED]


def families(*names: str) -> pytest.MarkDecorator:
    """The fixture `served` for these families."""
    return pytest.mark.parametrize("served", names, indirect=True)


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """A checkpoint, and the implementation of its layers."""
    name, impl = request.param.split(" by ")
    # Heads of a size that kernels serve.
    path = tmp_path_factory.mktemp("graphs") / name
    return write(name, path, {"head_dim": 16, "hidden_size": 64}), impl


def loaded(folder: Path, impl: str) -> tuple[StepModel, PageCache, Limits]:
    config = WorkerConfig(device="cpu", model_impl=impl, block_size=4, max_model_len=CONTEXT)
    model = startup.load(config, folder, "float32", "")
    plan = model.kv_plan
    assert plan is not None
    assert [group.window for group in plan.groups] == [None, WINDOW]
    limits = Limits(
        num_blocks=NUM_PAGES,
        block_size=plan.groups[0].block_size,
        max_num_seqs=6,
        max_num_batched_tokens=64,
        max_model_len=CONTEXT,
        vocab_size=VOCAB_SIZE,
        kv_groups=plan.groups,
    )
    return model.decoder, PageCache(plan, NUM_PAGES, CPU), limits


def record(model: StepModel) -> None:
    """Gives a model the layers that graphs record on CUDA."""
    if isinstance(model, TransformersModel):
        assert KernelAttention.serves(model._layout)
        model._kernels = KernelAttention(model._layout, torch.empty(0))
        model.stack = TransformersStack(model, model._layout)
    else:
        assert isinstance(model, Decoder)
        model.fused = model._fuse()


@pytest.fixture
def runners(
    served: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, few_programs: None
) -> Iterator[tuple[ModelRunner, ModelRunner]]:
    """The runner of the CPU, and that of CUDA with kernels interpreted."""
    from worker_svc.runner.cuda_runner import CudaRunner  # noqa: PLC0415 - Triton must interpret

    eager = EagerRunner(*loaded(*served), CPU)
    monkeypatch.setattr(compiled, "supports", lambda heads, kinds: False)
    monkeypatch.setattr(linear, "pack", lambda weight, bias: None)
    model, cache, limits = loaded(*served)
    record(model)
    use_few_splits(monkeypatch)
    yield eager, launching(CudaRunner(model, cache, limits, CPU), monkeypatch)


@dataclass(slots=True)
class Held:
    """A sequence of the planner below."""

    num_tokens: int
    num_computed: int = 0
    tables: list[list[int]] = field(default_factory=lambda: [[], []])
    num_freed: int = 0  # pages of its window


class Planner:
    """Random steps over both groups, with the pages that a scheduler would give.

    Plain steps are of sequences that all begin in the first, and ask for tokens alone.
    """

    def __init__(self, limits: Limits, is_plain: bool = False) -> None:
        self.limits = limits
        self.is_plain = is_plain
        self.random = np.random.default_rng(3)
        self.free = list(range(1, limits.num_blocks))
        self.held: dict[int, Held] = {}
        self.num_reused = 0

    def step(self, step_id: int) -> StepInput:
        freed = [slot for slot, one in self.held.items() if one.num_tokens >= CONTEXT - 2]
        for slot in freed:
            one = self.held.pop(slot)
            self.free += one.tables[0] + one.tables[1][one.num_freed :]
        new = []
        for slot in range(self.limits.max_num_seqs):
            chance = (step_id == 1 and slot < 4) if self.is_plain else 0.3
            if slot not in self.held and self.random.random() < chance:
                self.held[slot] = Held(int(self.random.integers(3, 17 if self.is_plain else 30)))
                new.append(slot)
        rows: dict[int, int] = {}
        gained: list[list[tuple[int, int]]] = [[], []]
        for slot, one in self.held.items():
            left = one.num_tokens - one.num_computed
            is_whole = self.is_plain or self.random.random() < 0.4
            count = left if is_whole else int(self.random.integers(1, left + 1))
            if sum(rows.values()) + count <= self.limits.max_num_batched_tokens and self._grow(
                slot, one.num_computed + count, gained
            ):
                rows[slot] = count
        return self._input(step_id, freed, new, rows, gained)

    def _grow(self, slot: int, end: int, gained: list[list[tuple[int, int]]]) -> bool:
        one, sizes = self.held[slot], [group.block_size for group in self.limits.groups]
        needed = [
            -(-end // size) - len(table) for size, table in zip(sizes, one.tables, strict=True)
        ]
        if sum(needed) > len(self.free):
            return False
        for group, number in enumerate(needed):
            for _ in range(number):
                page = self.free.pop(int(self.random.integers(len(self.free))))
                one.tables[group].append(page)
                gained[group].append((slot, page))
        return True

    def _input(
        self,
        step_id: int,
        freed: list[int],
        new: list[int],
        rows: dict[int, int],
        gained: list[list[tuple[int, int]]],
    ) -> StepInput:
        # A sequence enters with a part of its tables, and the others are appended.
        sequences = tuple(self._sequence(slot, gained) for slot in new)
        appended = [
            GroupBlocks(group, column(*[s for s, _ in some]), column(*[page for _, page in some]))
            for group, some in enumerate(gained)
        ]
        return StepInput(
            step_id,
            reset=step_id == 1,
            freed_slots=column(*freed),
            new_sequences=sequences,
            appended_slots=appended[0].slots,
            appended_block_ids=appended[0].block_ids,
            appended_to_groups=(appended[1],) if gained[1] else (),
            slots=column(*rows),
            num_scheduled=column(*rows.values()),
        )

    def _sequence(self, slot: int, gained: list[list[tuple[int, int]]]) -> NewSequence:
        tables = []
        for group in (0, 1):
            own = [pair for pair in gained[group] if pair[0] == slot]
            kept = own if self.random.random() < 0.6 else own[: len(own) // 2]
            gained[group] = [pair for pair in gained[group] if pair not in kept]
            tables.append(np.array([page for _, page in kept], dtype=np.int32))
        num_tokens = self.held[slot].num_tokens
        return NewSequence(
            slot=slot,
            request_id=str(slot),
            token_ids=self.random.integers(3, VOCAB_SIZE, num_tokens).astype(np.int32),
            num_prompt_tokens=num_tokens,
            num_computed_tokens=0,
            block_ids=tables[0],
            sampling=SAMPLINGS[0 if self.is_plain else int(self.random.integers(4))],
            group_block_ids=(tables[1],),
        )

    def done(self, step: StepInput) -> list[int]:
        """Counts a step's tokens; returns the pages that no sequence holds any more."""
        for slot, count in zip(step.slots.tolist(), step.num_scheduled.tolist(), strict=True):
            one = self.held[slot]
            one.num_computed += count
            one.num_tokens += one.num_computed == one.num_tokens
            unread = self.limits.groups[1].num_unread(one.num_computed)
            given_back = one.tables[1][one.num_freed : unread]
            self.free += given_back
            self.num_reused += len(given_back)
            one.num_freed = max(one.num_freed, unread)
        return self.free


def play(runners: tuple[ModelRunner, ModelRunner], planner: Planner, num_steps: int) -> int:
    """Compares the runners' answers to steps; returns the number of tokens compared."""
    num_tokens = 0
    for step_id in range(1, num_steps + 1):
        step = replace(planner.step(step_id), wants_state=planner.is_plain)
        eager, interpreted = (runner.execute(step) for runner in runners)
        assert not eager.error + interpreted.error
        assert eager.row_status is None
        assert interpreted.token_ids.tolist() == eager.token_ids.tolist()
        num_tokens += len(eager.token_ids)
        if eager.state is not None:
            assert interpreted.state is not None
            assert interpreted.state.hashes.tolist() == eager.state.hashes.tolist()
        free = torch.tensor([0, *planner.done(step)])
        for runner in runners:
            cache = runner.kv_cache
            cache.write_blocks(free, torch.full((len(free), *cache.block_shape), torch.nan))
    return num_tokens


@families("gpt_oss by transformers", "gpt_oss by native")
def test_random_steps_give_the_tokens_of_the_eager_runner(
    runners: tuple[ModelRunner, ModelRunner],
) -> None:
    planner = Planner(runners[0].limits)
    assert play(runners, planner, 9) > 14
    assert planner.num_reused > 8


@families("gemma3 by transformers", "gemma3 by native")
def test_decodes_give_the_tokens_and_the_state_of_the_eager_runner(
    runners: tuple[ModelRunner, ModelRunner],
) -> None:
    planner = Planner(runners[0].limits, is_plain=True)
    assert play(runners, planner, 12) > 40
    assert planner.num_reused > 5
    assert runners[1]._decode_graphs._loaded is not None, "steps went another way"
