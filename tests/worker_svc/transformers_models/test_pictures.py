"""Prompts with pictures under a scheduler: tokens equal transformers', however steps fall."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from pagewire.v1 import types_pb2
from scheduler_svc.engine import Engine
from tests.worker_svc.conftest import Worker, serving
from tests.worker_svc.transformers_models import test_served
from tests.worker_svc.transformers_models.pictured import (
    BEGIN,
    END,
    GOLDEN,
    IMAGE,
    NUM_TOKENS,
    SHORT,
    Golden,
    PictureOracle,
    bytes_of,
    drawn,
    picture,
    values_of,
    write,
)
from tests.worker_svc.transformers_models.test_served import generate, under_a_scheduler
from worker_svc.attention.pictures import rotations_of_prompt
from worker_svc.protocol.pictures import Pixels

CONFIG = replace(test_served.CONFIG, num_kv_blocks=64, max_num_batched_tokens=64)
PROMPT = [*SHORT, BEGIN, *[IMAGE] * 4, END, *SHORT[::-1]]
AT = PROMPT.index(IMAGE)


@dataclass(frozen=True, slots=True)
class Pictured:
    """A family's checkpoint in a worker, and transformers' model of it."""

    golden: Golden
    worker: Worker
    oracle: PictureOracle

    @property
    def outputs(self) -> Any:
        runner = self.worker.server.lifecycle.runner
        assert runner is not None and runner.state.pictures is not None
        return runner.state.pictures


@pytest.fixture(scope="module", params=GOLDEN)
def pictured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pictured]:
    folder = write(request.param, tmp_path_factory.mktemp("pictured") / request.param)
    with serving(CONFIG, folder) as worker:
        yield Pictured(GOLDEN[request.param], worker, PictureOracle(request.param, folder))


async def test_the_known_tokens_come_of_a_prompt_whole_and_in_chunks(
    pictured: Pictured, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Normal numbers are no bytes: in their place the encoder finds them, as they are.
    values = drawn("pixels", pictured.golden.pixels).numpy()
    shape = (1 if pictured.golden.kind == "gemma3" else len(values), 3, -1)
    monkeypatch.setattr(Pixels, "rows", values.reshape(shape) * 127.5 + 127.5)
    drawn_picture = picture(pictured.golden, AT, bytes_of(pictured.golden, 1000))

    async def work(engine: Engine, stub: Any) -> list[list[int]]:
        return [
            await generate(stub, PROMPT, NUM_TOKENS, pictures=[drawn_picture], cache_salt="golden")
        ]

    for threshold in (0, 1, 3, 10):
        found, _ = await under_a_scheduler(
            pictured.worker, work, long_prefill_token_threshold=threshold
        )
        assert found == [pictured.golden.tokens], threshold
    pictured.outputs._kept.clear()


Parts = list[int | np.ndarray]  # tokens, and the bytes of pictures


def laid_out(golden: Golden, parts: Parts) -> tuple[list[int], list[types_pb2.Picture]]:
    """The prompt of some parts, and its pictures."""
    prompt: list[int] = []
    pictures = []
    for part in parts:
        if isinstance(part, int):
            prompt.append(part)
            continue
        pictures.append(picture(golden, len(prompt) + 1, part))
        prompt += [BEGIN, *[IMAGE] * 4, END]
    return prompt, pictures


def wanted(pictured: Pictured, parts: Parts, num_tokens: int = NUM_TOKENS) -> list[int]:
    """The tokens after some parts by transformers."""
    prompt, _ = laid_out(pictured.golden, parts)
    pixels = [values_of(part) for part in parts if not isinstance(part, int)]
    return pictured.oracle.greedy(prompt, pixels, num_tokens)


async def ask(
    stub: Any, pictured: Pictured, parts: Parts, num_tokens: int = NUM_TOKENS, **fields: Any
) -> list[int]:
    prompt, pictures = laid_out(pictured.golden, parts)
    return await generate(stub, prompt, num_tokens, pictures=pictures, **fields)


def words(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 140, count).tolist()


def layouts(golden: Golden) -> list[Parts]:
    """Prompts with pictures first, last, one after the other, far apart, and with none."""
    one, two = bytes_of(golden, 1), bytes_of(golden, 2)
    return [
        [one, *words(1, 5)],
        [*words(2, 9), one],
        [*words(3, 3), one, two, *words(4, 3)],
        [*words(5, 2), two, *words(6, 21), one, *words(7, 4), two, 5],
        [*words(8, 20)],
        [*words(9, 6), two, *words(10, 6)],
    ]


async def test_pictures_anywhere_together_in_chunks_preempted_and_after_a_lost_worker(
    pictured: Pictured,
) -> None:
    prompts = layouts(pictured.golden) * 2

    async def together(engine: Engine, stub: Any) -> list[list[int]]:
        calls = [asyncio.create_task(ask(stub, pictured, parts)) for parts in prompts]
        (group,) = engine.groups
        while not group.core.view.num_preemptions:
            assert not all(call.done() for call in calls)
            test_served._preempt_one(group.core)
            await asyncio.sleep(0.001)
        session = pictured.worker.server._session
        session.end(session._stream, None)
        return await asyncio.gather(*calls)

    found, engine = await under_a_scheduler(
        pictured.worker, together, long_prefill_token_threshold=7
    )
    assert found == [wanted(pictured, parts) for parts in prompts]
    (group,) = engine.groups
    assert group.num_recoveries == 1 and group.core.view.num_preemptions > 0


async def test_one_picture_of_two_requests_is_encoded_once(pictured: Pictured) -> None:
    first, second = (
        [bytes_of(pictured.golden, 11), 9],
        [*words(1, 5), bytes_of(pictured.golden, 11)],
    )
    num_encoded, num_found = pictured.outputs.num_encoded, pictured.outputs.num_found

    async def both(engine: Engine, stub: Any) -> list[list[int]]:
        return list(await asyncio.gather(*(ask(stub, pictured, p) for p in (first, second))))

    found, _ = await under_a_scheduler(pictured.worker, both)
    assert found == [wanted(pictured, first), wanted(pictured, second)]
    assert pictured.outputs.num_encoded == num_encoded + 1
    assert pictured.outputs.num_found == num_found + 1


async def test_pictures_of_one_size_share_no_block_and_equal_ones_do(pictured: Pictured) -> None:
    def shown(seed: int) -> Parts:
        return [*words(1, 5), bytes_of(pictured.golden, seed), 60, 61, 62]

    first = wanted(pictured, shown(21))
    seed = next(n for n in range(22, 40) if wanted(pictured, shown(n))[:3] != first[:3])
    prompts = [shown(21), shown(seed), shown(21)]
    num_hits = []

    async def each(engine: Engine, stub: Any) -> list[list[int]]:
        found = []
        for parts in prompts:
            found.append(await ask(stub, pictured, parts))
            num_hits.append(engine.groups[0].core.counters.prefix_hit_tokens)
        return found

    found, _ = await under_a_scheduler(pictured.worker, each)
    assert found == [wanted(pictured, parts) for parts in prompts]
    assert num_hits[1] in (0, 4)  # the block before the picture
    # A model with states finds them again at a snapshot alone, where its prompt ended.
    assert num_hits[2] - num_hits[1] >= (0 if pictured.golden.kind == "qwen3_5" else 12)


async def test_a_worker_lost_within_a_picture_continues(pictured: Pictured) -> None:
    parts: Parts = [*words(3, 2), bytes_of(pictured.golden, 31), *words(4, 8)]
    computed: list[int] = []

    async def cut(engine: Engine, stub: Any) -> list[list[int]]:
        call = asyncio.create_task(ask(stub, pictured, parts))
        (group,) = engine.groups
        state = group.core.internal_state
        while not state.running.sequences:
            await asyncio.sleep(0)
        computed.append(int(state.table.num_computed[state.running.index[0]]))
        session = pictured.worker.server._session
        session.end(session._stream, None)
        return [await call]

    found, engine = await under_a_scheduler(pictured.worker, cut, long_prefill_token_threshold=5)
    assert found == [wanted(pictured, parts)]
    assert engine.groups[0].num_recoveries == 1
    # Its first chunk ends within the picture, or before one that is to be computed whole.
    assert computed == [3 if pictured.golden.kind == "gemma3" else 5]


async def test_bad_pixels_end_their_request_by_name_and_no_other(pictured: Pictured) -> None:
    golden, good = pictured.golden, [bytes_of(pictured.golden, 41), 7]
    prompt, (fine,) = laid_out(golden, good)
    bad = []
    for field, value in (
        ("num_rows", 3),
        ("num_rows", 0),
        ("num_rows", 2**31 - 1),
        ("values", b""),
        ("values", fine.pixels.values[:-3]),
        ("grid", [1, 2, 8, 1]),
        ("grid", [2, 2, 4]),
        ("grid", [1, 2**31 - 1, 2**31 - 1]),
        ("grid", [1, 0, 0]),
        ("grid", [1, 16, 1]),
        ("means", [1.0]),
        ("deviations", [1.0, 0.0, 1.0]),
        ("deviations", [1.0, float("nan"), 1.0]),
    ):
        changed = types_pb2.Picture()
        changed.CopyFrom(fine)
        changed.content_id = bytes([len(bad)]) * 16
        changed.pixels.ClearField(field)
        if isinstance(value, list):
            getattr(changed.pixels, field).extend(value)
        else:
            setattr(changed.pixels, field, value)
        bad.append(changed)
    problems: list[str] = []

    async def work(engine: Engine, stub: Any) -> list[list[int]]:
        for changed in bad:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await generate(stub, prompt, pictures=[changed])
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT, error.value
            problems.append(error.value.details() or "")
        return [await ask(stub, pictured, good)]

    found, engine = await under_a_scheduler(pictured.worker, work)
    assert found == [wanted(pictured, good)]
    assert engine.groups[0].num_recoveries == 0
    assert all(problems)


@pytest.mark.parametrize("seed", range(20))
def test_rotations_are_those_of_transformers(pictured: Pictured, seed: int) -> None:
    if pictured.golden.kind == "gemma3":
        pytest.skip("its tokens have one position each")
    random = np.random.default_rng(seed)
    prompt, grids, begins = words(seed, int(random.integers(0, 5))), [], []
    for _ in range(int(random.integers(1, 4))):
        height, width = (int(n) for n in random.integers(1, 6, 2))
        begins.append(len(prompt) + 1)
        grids.append((1, height, width))
        text = words(seed, int(random.integers(0, 4)))
        prompt += [BEGIN, *[IMAGE] * (height * width), END, *text]
    ids = torch.tensor([prompt])
    expected, delta = pictured.oracle.model.model.get_rope_index(
        ids,
        mm_token_type_ids=(ids == IMAGE).int(),
        image_grid_thw=torch.tensor([[t, 2 * h, 2 * w] for t, h, w in grids]),
    )
    found = rotations_of_prompt(len(prompt), begins, grids)
    assert found.tolist() == expected[:, 0].tolist()
    assert found[:, -1].max() + 1 - len(prompt) == int(delta)
