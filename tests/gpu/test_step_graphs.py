"""Steps with prompts as graphs against the same steps launched kernel by kernel, in float32."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.gpu import test_cuda_runner
from tests.gpu.test_cuda_runner import (
    BLOCKS_PER_SEQ,
    SHAPE,
    Client,
    column,
    make_prompt,
    make_runner,
)
from tests.worker_svc.random_models import save_random_model
from tests.worker_svc.runner.swapping import NUM_HOST_BLOCKS, SwapPlay
from worker_svc.protocol.step import RowSampling, StepMoves
from worker_svc.runner.cuda_runner import CudaRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MAX_NUM_SEQS = 70
MOST_TOKENS = 600
NUM_BLOCKS = 1 + MAX_NUM_SEQS * BLOCKS_PER_SEQ
CONFIG = dataclasses.replace(
    test_cuda_runner.CONFIG,
    num_kv_blocks=NUM_BLOCKS,
    max_num_seqs=MAX_NUM_SEQS,
    max_num_batched_tokens=MOST_TOKENS,
    host_blocks=NUM_HOST_BLOCKS,
)
GREEDY = RowSampling()
DRAWN = RowSampling(temperature=1.3, seed=5)
FILTERED = RowSampling(temperature=1.1, top_p=0.8, top_k=20, seed=9)
ASKING = (
    RowSampling(num_top_logprobs=3),
    RowSampling(num_top_logprobs=0, logprob_token_ids=(7, 50, 3, 7)),
    RowSampling(presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.2),
    RowSampling(temperature=1.0, seed=3, logit_bias=((7, 4.0), (9, -3.0)), num_top_logprobs=0),
    RowSampling(min_tokens=50, stop_token_ids=(3, 4, 5), bad_words_token_ids=((8,), (9, 10))),
    RowSampling(temperature=0.9, top_k=5, seed=4, allowed_token_ids=(10, 11, 12, 13)),
)
Play = Callable[[Client], None]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> CudaRunner:
    folder: Path = tmp_path_factory.mktemp("models") / "qwen3"
    save_random_model(folder, (Qwen3Config, Qwen3ForCausalLM), SHAPE)
    made = make_runner(folder, CONFIG)
    assert isinstance(made, CudaRunner)
    return made


def played(runner: CudaRunner, play: Play) -> tuple[dict[int, list[int]], int]:
    """The tokens of every slot, and how many steps were graphs of steps."""
    num_mapped = 0
    begin = runner._step_graphs.begin

    def counting(step: object) -> None:
        nonlocal num_mapped
        num_mapped += 1
        begin(step)  # type: ignore[arg-type]

    client = Client(runner)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner._step_graphs, "begin", counting)
        play(client)
        client.drain()
    assert all(status is None for status in client.statuses)
    return client.tokens, num_mapped


def check(runner: CudaRunner, play: Play, at_least: int = 1) -> None:
    """Graphs give what the same steps give when no graph holds them."""
    by_graph, num_mapped = played(runner, play)
    assert num_mapped >= at_least
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner._step_graphs, "map", lambda rows: None)
        by_kernels, none_mapped = played(runner, play)
    assert none_mapped == 0
    assert by_graph == by_kernels
    assert len({token for tokens in by_graph.values() for token in tokens}) > 1


def prompts_of(num_tokens: int, longest: int = 180) -> dict[int, list[int]]:
    """Prompts of so many tokens in all, in slots from 60 on."""
    full, rest = divmod(num_tokens, longest)
    lengths = [longest] * full + [rest] * (rest > 0)
    return {60 + i: make_prompt(length, seed=i) for i, length in enumerate(lengths)}


def arriving(client: Client, num_decodes: int, prompts: dict[int, list[int]]) -> None:
    """Rows decode, prompts come in between, and all decode on."""
    decoding = {slot: make_prompt(3 + slot % 29, seed=slot) for slot in range(num_decodes)}
    if decoding:
        new = tuple(client.enter(slot, prompt, GREEDY) for slot, prompt in decoding.items())
        lengths = {slot: len(prompt) for slot, prompt in decoding.items()}
        for some in np.array_split(list(lengths), 4):
            part = {int(slot): lengths[int(slot)] for slot in some}
            if part:
                entering = tuple(one for one in new if one.slot in part)
                client.launch(part, new_sequences=entering)
        client.launch(dict.fromkeys(decoding, 1))
    new = tuple(client.enter(slot, prompt, GREEDY) for slot, prompt in prompts.items())
    together = dict.fromkeys(decoding, 1) | {slot: len(p) for slot, p in prompts.items()}
    client.launch(together, new_sequences=new)
    for _ in range(2):
        client.launch(dict.fromkeys(together, 1))


def test_the_largest_graph_is_that_of_the_largest_step(runner: CudaRunner) -> None:
    sizes = runner._step_graphs.sizes
    assert sizes[:3] == (8, 16, 32) and sizes[-1] == MOST_TOKENS


@pytest.mark.parametrize("num_decodes", [0, 1, 33])
@pytest.mark.parametrize("by", [-1, 0, 1])
def test_around_every_size_tokens_are_those_of_eager_steps(
    runner: CudaRunner, by: int, num_decodes: int
) -> None:
    for size in runner._step_graphs.sizes:
        num_prompt = size + by - num_decodes
        if num_prompt < 2 or size + by > MOST_TOKENS:
            continue
        check(runner, lambda client, n=num_prompt: arriving(client, num_decodes, prompts_of(n)))


def test_many_short_prompts_share_a_step(runner: CudaRunner) -> None:
    short = {slot: make_prompt(2 + slot % 5, seed=slot) for slot in range(30, 60)}
    check(runner, lambda client: arriving(client, 7, short))


def test_chunks_of_prompts_go_on_where_they_ended(runner: CudaRunner) -> None:
    def play(client: Client) -> None:
        first, second = make_prompt(20, seed=1), make_prompt(150, seed=2)
        client.launch({0: 20}, new_sequences=(client.enter(0, first, GREEDY),))
        entering = client.enter(5, second, DRAWN)
        client.launch({0: 1, 5: 63}, sampled=[0], new_sequences=(entering,))
        client.launch({5: 16}, sampled=[])
        client.launch({5: 70, 0: 1}, sampled=[0])
        client.launch({0: 1, 5: 1})
        for _ in range(4):
            client.launch({5: 1, 0: 1})

    check(runner, play, at_least=4)


def test_cached_prefixes_and_forks_are_read_from_their_blocks(runner: CudaRunner) -> None:
    def play(client: Client) -> None:
        prompt = make_prompt(100, seed=8)
        client.launch({3: 100}, new_sequences=(client.enter(3, prompt, GREEDY),))
        client.launch({3: 1})
        blocks = 1 + 3 * BLOCKS_PER_SEQ + np.arange(BLOCKS_PER_SEQ, dtype=np.int32)
        own = [
            1 + slot * BLOCKS_PER_SEQ + np.arange(BLOCKS_PER_SEQ, dtype=np.int32) for slot in (8, 9)
        ]
        # A prompt that begins alike reads six blocks; a fork has a copy of the seventh as well.
        cached = dataclasses.replace(
            client.enter(8, prompt[:96] + make_prompt(31, seed=4), DRAWN),
            num_computed_tokens=96,
            block_ids=np.concatenate([blocks[:6], own[0][6:]]),
        )
        forked = dataclasses.replace(
            client.enter(9, prompt, DRAWN),
            num_computed_tokens=99,
            block_ids=np.concatenate([blocks[:6], own[1][6:]]),
        )
        nothing = column([])
        moves = StepMoves(
            nothing, nothing, nothing, nothing, column([blocks[6]]), column([own[1][6]])
        )
        client.launch({3: 1, 8: 31, 9: 1}, new_sequences=(cached, forked), moves=moves)
        for _ in range(4):
            client.launch({3: 1, 8: 1, 9: 1})

    check(runner, play, at_least=2)


@pytest.mark.parametrize("arrives", [False, True], ids=["decoding", "mixed"])
def test_swaps_between_steps_change_no_token(
    runner: CudaRunner, monkeypatch: pytest.MonkeyPatch, arrives: bool
) -> None:
    play = SwapPlay(runner.limits.block_size, BLOCKS_PER_SEQ, arrives)
    by_graph, num_mapped = played(runner, play)
    assert num_mapped == (3 if arrives else 1)  # all others are plain decodes
    assert played(runner, dataclasses.replace(play, swaps=False))[0] == by_graph
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_is_plain", lambda staged: False)
        patch.setattr(runner._step_graphs, "map", lambda rows: None)
        patch.setattr(runner._decode_graphs, "replay", None)  # nothing may use it
        by_kernels, none_mapped = played(runner, play)
    assert none_mapped == 0
    assert by_kernels == by_graph
    assert all(len(set(tokens)) > 1 for tokens in by_graph.values())


def test_rows_that_draw_and_filter_draw_alike(runner: CudaRunner) -> None:
    def play(client: Client) -> None:
        how = [GREEDY, DRAWN, FILTERED] * 5
        new = tuple(client.enter(s, make_prompt(9 + s, seed=s), way) for s, way in enumerate(how))
        client.launch({s: 9 + s for s in range(8)}, new_sequences=new[:8])
        client.launch(
            dict.fromkeys(range(8), 1) | {s: 9 + s for s in range(8, 15)}, new_sequences=new[8:]
        )
        for _ in range(3):
            client.launch(dict.fromkeys(range(15), 1))

    check(runner, play, at_least=2)


@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_rows_that_ask_for_more_stay_in_the_graph_with_their_neighbours(
    runner: CudaRunner, num_rows: int
) -> None:
    def play(client: Client) -> None:
        how = [ASKING[slot % 7] if slot % 7 < len(ASKING) else DRAWN for slot in range(num_rows)]
        prompts = [make_prompt(4 + slot % 11, seed=slot) for slot in range(num_rows)]
        new = [client.enter(slot, prompts[slot], how[slot]) for slot in range(num_rows)]
        lengths = {slot: len(prompt) for slot, prompt in enumerate(prompts)}
        client.launch(lengths, new_sequences=tuple(new))
        for _ in range(6):
            client.launch(dict.fromkeys(lengths, 1))

    check(runner, play, at_least=7)


def test_a_failed_launch_leaves_no_trace(runner: CudaRunner) -> None:
    prompt, other = make_prompt(10), make_prompt(6, seed=3)

    def calm(client: Client, fails: bool = False) -> None:
        client.launch({0: 10}, new_sequences=(client.enter(0, prompt, GREEDY),))
        client.launch({0: 1})
        client.drain()
        if fails:
            fail(client)
        client.launch({0: 1, 1: 6}, new_sequences=(client.enter(1, other, GREEDY),))
        for _ in range(3):
            client.launch({0: 1, 1: 1})

    def broken(step: object, filters: bool) -> None:
        raise torch.OutOfMemoryError("no memory")

    def fail(client: Client) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner._step_graphs, "sample", broken)
            client.launch({0: 1, 1: 6}, new_sequences=(client.enter(1, other, GREEDY),))
            assert "no memory" in client.collect().error

    expected, _ = played(runner, calm)
    assert played(runner, partial(calm, fails=True))[0] == expected
