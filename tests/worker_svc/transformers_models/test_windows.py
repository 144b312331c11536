"""Models with windows under a scheduler: KV groups, each with a block table and pages of one pool.

Tokens equal transformers' own whatever happens to the pages of a window: at its edges, at those of
chunks, after swaps, forks, prefix hits and random requests; and the null block is never read.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from scheduler_svc.core import KvGroup, Preemption
from scheduler_svc.core.invariants import check_invariants
from scheduler_svc.engine import Engine
from tests.worker_svc.conftest import Attachment, Worker, serving
from tests.worker_svc.transformers_models import test_served
from tests.worker_svc.transformers_models.families import VOCAB_SIZE, WINDOW, write
from tests.worker_svc.transformers_models.test_served import generate, prompt_of
from worker_svc.config import WorkerConfig

LONGEST, CONTEXT = 48, 64
NUM_BLOCKS, NUM_HOST_BLOCKS = 33, 64
CONFIG = replace(
    test_served.CONFIG,
    num_kv_blocks=NUM_BLOCKS,
    host_blocks=NUM_HOST_BLOCKS,
    max_num_batched_tokens=48,
    max_model_len=CONTEXT,
)
# Two layers with a window to one without: its pages hold twice the tokens.
BOTH = (KvGroup(8), KvGroup(4, window=WINDOW))
GROUPS = {
    "gemma2": BOTH,
    "gemma3": BOTH,
    "gpt_oss": BOTH,
    "gemma4": (KvGroup(4), KvGroup(8, window=WINDOW)),  # one layer each, and heads twice as large
    "mistral": (KvGroup(4, window=WINDOW),),
    "llama4": (KvGroup(4, window=WINDOW),),  # a chunk reaches no farther back than a window
}
BY_OURS = ("gemma2", "gemma4")  # in tests of layers of ours alone
NUM_REQUESTS = 20  # at random
EDGES = range(WINDOW - 2, WINDOW + 3)


@dataclass(frozen=True, slots=True)
class Windowed:
    """A family's checkpoint in a worker, and the tokens that transformers gives."""

    name: str
    folder: Path
    worker: Worker
    model: Any

    def check(self, found: list[list[int]], prompts: list[list[int]], num_tokens: int) -> None:
        """Compares answers, each token of which must be a clear winner."""
        assert self._num_clear(found, prompts, num_tokens) == num_tokens * len(prompts), (
            "take prompts with clear winners"
        )

    def check_most(self, found: list[list[int]], prompts: list[list[int]], num_tokens: int) -> None:
        """Compares longer answers as far as their winners are clear, which most are."""
        assert self._num_clear(found, prompts, num_tokens) > num_tokens * len(prompts) / 2

    def _num_clear(self, found: list[list[int]], prompts: list[list[int]], num_tokens: int) -> int:
        assert [len(tokens) for tokens in found] == [num_tokens] * len(prompts)
        return sum(map(self.num_clear, found, prompts))

    @torch.inference_mode()
    def num_clear(self, answer: list[int], prompt: list[int]) -> int:
        """The number of an answer's tokens up to one that rounding could choose differently.

        Asserts that they are transformers' own greedy tokens. One pass over prompt and answer tells
        it, since no token sees a later one: while all before are equal, the next must be, too.
        """
        tokens = torch.tensor([[*prompt, *answer[:-1]]])
        logits = self.model(tokens, use_cache=False).logits[0, len(prompt) - 1 :]
        best = logits.topk(2)
        close = (best.values[:, 0] - best.values[:, 1] < 1e-4).tolist()
        num_clear = close.index(True) if True in close else len(answer)
        assert answer[:num_clear] == best.indices[:num_clear, 0].tolist()
        return num_clear


@contextmanager
def served(
    name: str, folder: Path, config: WorkerConfig, sizes: dict[str, Any] | None = None
) -> Iterator[Windowed]:
    """A family's checkpoint in a worker, whose null block gives NaN to whatever reads it."""
    write(name, folder, sizes)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with serving(config, folder) as worker:
        poison_the_null_block(worker)
        yield Windowed(name, folder, worker, model)


@pytest.fixture(scope="module", params=[name for name in GROUPS if name not in BY_OURS])
def windowed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Windowed]:
    with served(request.param, tmp_path_factory.mktemp("windows") / request.param, CONFIG) as found:
        yield found


def poison_the_null_block(worker: Worker) -> None:
    runner = worker.server.lifecycle.runner
    assert runner is not None
    cache = runner.kv_cache
    content = torch.full((1, *cache.block_shape), torch.nan, device=runner.device)
    cache.write_blocks(torch.zeros(1, dtype=torch.int64, device=runner.device), content)


async def test_the_scheduler_has_a_table_for_each_group(windowed: Windowed) -> None:
    async def nothing(engine: Engine, stub: Any) -> list[list[int]]:
        return []

    _, engine = await test_served.under_a_scheduler(windowed.worker, nothing)
    assert engine.groups[0].core.config.groups == GROUPS[windowed.name]


@pytest.mark.parametrize("chunk", [0, 1, *EDGES])
async def test_the_first_tokens_after_every_length_in_chunks_of_every_edge(
    windowed: Windowed, chunk: int
) -> None:
    """Prompts of the window's length, and more than it, in chunks that end around it."""
    prompt = prompt_of(LONGEST)
    lengths = [*EDGES, *(2 * WINDOW + n for n in range(-2, 3)), LONGEST]

    async def each(engine: Engine, stub: Any) -> list[list[int]]:
        calls = (generate(stub, prompt[:n], 3, skip_prefix_cache=True) for n in lengths)
        return list(await asyncio.gather(*calls))

    found, _ = await test_served.under_a_scheduler(
        windowed.worker, each, long_prefill_token_threshold=chunk
    )
    windowed.check(found, [prompt[:n] for n in lengths], 3)


async def test_a_cached_prefix_of_every_length_is_gone_on_from(windowed: Windowed) -> None:
    prompt, rest = prompt_of(LONGEST), prompt_of(5)
    prompts = [prompt, *(prompt[:n] + rest for n in range(4, LONGEST, 4))]

    async def each(engine: Engine, stub: Any) -> list[list[int]]:
        return [await generate(stub, one, 4) for one in prompts]

    found, engine = await test_served.under_a_scheduler(windowed.worker, each)
    windowed.check(found, prompts, 4)
    assert engine.groups[0].core.counters.prefix_hit_tokens >= LONGEST
    check_invariants(engine.groups[0].core)


@pytest.mark.parametrize("windowed", ["gemma3", "mistral"], indirect=True)
@pytest.mark.parametrize("caches", [True, False])
async def test_what_was_swapped_out_goes_on_with_the_same_tokens(
    windowed: Windowed, caches: bool
) -> None:
    prompts = [prompt_of(length) for length in (5, 9, 12, 15, 17, 20, 22, 26)]

    async def together(engine: Engine, stub: Any) -> list[list[int]]:
        return list(await asyncio.gather(*(generate(stub, one, 36) for one in prompts)))

    found, engine = await test_served.under_a_scheduler(
        windowed.worker,
        together,
        preemption=Preemption.SWAP,
        enable_prefix_caching=caches,
        lookahead=1,
    )
    windowed.check_most(found, prompts, 36)
    view = engine.groups[0].core.view
    assert view.num_free_host_blocks == NUM_HOST_BLOCKS
    assert view.num_swapped_in > 0 or len(GROUPS[windowed.name]) == 1, "windows alone have room"


async def test_siblings_get_the_tokens_that_they_would_get_alone(windowed: Windowed) -> None:
    prompts = [prompt_of(length) for length in (3, 8, 11, 21)]

    async def together(engine: Engine, stub: Any) -> list[list[int]]:
        calls = (
            generate(stub, prompt, 12, fork_group=f"of {len(prompt)}")
            for prompt in prompts
            for _ in range(2)
        )
        return list(await asyncio.gather(*calls))

    found, engine = await test_served.under_a_scheduler(windowed.worker, together)
    windowed.check(found, [prompt for prompt in prompts for _ in range(2)], 12)
    assert engine.groups[0].core.counters.num_forks > 0


async def test_random_requests_get_their_tokens_and_leave_no_page(windowed: Windowed) -> None:
    """Requests that share prefixes, fork, are cancelled and preempted, with grants."""
    random = np.random.default_rng(11)
    base = random.integers(3, VOCAB_SIZE, LONGEST).tolist()
    wanted: dict[int, tuple[list[int], int]] = {}
    for number in range(NUM_REQUESTS):
        shared, own = int(random.integers(0, 33)), int(random.integers(1, 12))
        prompt = base[:shared] + random.integers(3, VOCAB_SIZE, own).tolist()
        wanted[number] = prompt, int(random.integers(1, CONTEXT - len(prompt) - 1))
    cancelled = set(random.choice(NUM_REQUESTS, 4, replace=False).tolist())

    async def one(stub: Any, number: int) -> list[int]:
        prompt, num_tokens = wanted[number]
        await asyncio.sleep(float(random.random()) * 0.2)
        call = asyncio.create_task(generate(stub, prompt, num_tokens))
        if number in cancelled:
            await asyncio.sleep(float(random.random()) * 0.05)
            call.cancel()
        return await call

    async def all_of_them(engine: Engine, stub: Any) -> list[list[int]]:
        calls = [asyncio.create_task(one(stub, number)) for number in wanted]
        await asyncio.wait(calls)
        core = engine.groups[0].core
        while list(core.live()):
            await asyncio.sleep(0.01)
        check_invariants(core)
        assert core.view.num_free_blocks == core.view.num_blocks
        return [[] if call.cancelled() else call.result() for call in calls]

    found, engine = await test_served.under_a_scheduler(
        windowed.worker, all_of_them, preemption=Preemption.SWAP, lookahead=1, max_grant=4
    )
    num_compared = 0
    for number, tokens in enumerate(found):
        prompt, num_tokens = wanted[number]
        if tokens or number not in cancelled:
            assert len(tokens) == num_tokens
            num_compared += windowed.num_clear(tokens, prompt)
    assert num_compared > 200
    assert engine.groups[0].num_recoveries == 0


# --- memory --------------------------------------------------------------------------------------

NUM_SEQUENCES, PROMPT, OUTPUT = 64, 120, 24


async def test_64_long_sequences_hold_their_full_layers_and_windows(tmp_path: Path) -> None:
    """A prompt is 15 windows long; in one table all layers would keep all of it."""
    folder = write("gemma3", tmp_path / "gemma3", {"max_position_embeddings": 256})
    end = PROMPT + OUTPUT
    full, window = -(-end // 8), -(-WINDOW // 4) + 1
    config = replace(
        CONFIG,
        num_kv_blocks=1 + NUM_SEQUENCES * (full + window + 1),
        host_blocks=0,
        max_num_seqs=NUM_SEQUENCES,
        max_num_batched_tokens=256,
        max_model_len=end + 1,
    )
    prompts = [np.random.default_rng(n).integers(3, VOCAB_SIZE, PROMPT).tolist() for n in range(64)]
    held: list[int] = []

    async def together(engine: Engine, stub: Any) -> list[list[int]]:
        calls = [asyncio.create_task(generate(stub, one, OUTPUT)) for one in prompts]
        view = engine.groups[0].core.view
        while not all(call.done() for call in calls):
            held.append(view.num_blocks - view.num_free_blocks)
            await asyncio.sleep(0.002)
        assert view.num_preemptions == 0
        return [call.result() for call in calls]

    with serving(config, folder) as worker:
        poison_the_null_block(worker)
        plan = worker.server.lifecycle._model.kv_plan
        found, _ = await test_served.under_a_scheduler(
            worker, together, max_num_seqs=NUM_SEQUENCES, enable_prefix_caching=False
        )
    assert [len(tokens) for tokens in found] == [OUTPUT] * NUM_SEQUENCES
    # At the end of all prompts each has nearly all of its pages of full layers.
    assert NUM_SEQUENCES * (full - 3) < max(held) <= NUM_SEQUENCES * (full + window + 1)
    tokens_in_one_table = end * sum(shape.width for shape in plan.shapes)
    assert max(held) * plan.page_width < NUM_SEQUENCES * tokens_in_one_table / 2


# --- options and versions ------------------------------------------------------------------------


async def test_one_group_is_had_for_the_asking_with_the_same_tokens(windowed: Windowed) -> None:
    prompts = [prompt_of(length) for length in (3, 17, 33)]

    async def each(engine: Engine, stub: Any) -> list[list[int]]:
        return [await generate(stub, prompt) for prompt in prompts]

    with serving(replace(CONFIG, kv_groups="one"), windowed.folder) as worker:
        description = worker.describe().description
        found, engine = await test_served.under_a_scheduler(worker, each)
    assert not description.kv_groups
    assert engine.groups[0].core.config.kv_groups == ()
    windowed.check(found, prompts, test_served.NUM_TOKENS)


@pytest.mark.parametrize("minor", [0, 2, 3, 4])
def test_a_scheduler_below_3_is_refused_by_name(windowed: Windowed, minor: int) -> None:
    worker = windowed.worker
    epoch = worker.describe().epoch + 1
    attachment = Attachment(worker.channel, epoch, protocol_minor=minor)
    if minor >= 3:
        told = attachment.receive_description()
        groups = [(group.block_size, group.window or None) for group in told.kv_groups]
        assert groups == [(one.block_size, one.window) for one in GROUPS[windowed.name]]
        assert told.block_size == groups[0][0]
        assert told.protocol_minor >= 3
        attachment.close()
        return
    with pytest.raises(grpc.RpcError) as raised:
        attachment.receive_description()
    attachment.cancel()
    assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert f"protocol_minor {minor} knows no kv_groups" in raised.value.details()
