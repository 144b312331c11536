"""Steps over an FP8 cache: however a sequence's KV was made and moved, its tokens stay the same.

Every test runs both formats, by the C kernels and by torch.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.worker_svc.conftest import WORKER_CONFIG, Greedy, make_prompt
from tests.worker_svc.parallel.test_tensor_parallel import on_ranks
from tests.worker_svc.runner.test_runner import POISON, Driver, column, sequence
from worker_svc.config import WorkerConfig
from worker_svc.parallel.group import ALONE, Group
from worker_svc.protocol.step import NewSequence, StepMoves
from worker_svc.runner.model_runner import ModelRunner
from worker_svc.startup import startup

NUM_TOKENS = 6
KINDS = ("fp8_e4m3", "fp8_e5m2")
PROMPT = make_prompt(70, seed=5)  # four full blocks and six tokens in a fifth


@pytest.fixture(params=["c", "torch"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "0")
    return str(request.param)


@pytest.fixture(params=KINDS)
def config(request: pytest.FixtureRequest) -> WorkerConfig:
    return replace(WORKER_CONFIG, kv_cache_dtype=request.param, host_blocks=6)


def build(config: WorkerConfig, folder: Path, group: Group = ALONE) -> ModelRunner:
    loaded = startup.load(config, folder, "float32", "", group)
    return startup.build_runner(config, loaded, num_blocks=64)


@pytest.fixture
def driver(config: WorkerConfig, implementation: str, llama_folder: Path) -> Iterator[Driver]:
    yield Driver(build(config, llama_folder))


def decode(driver: Driver, slot: int, first: int, **fields: object) -> list[int]:
    """The next tokens of the one sequence that runs, after its first."""
    tokens = [first]
    while len(tokens) < NUM_TOKENS:
        tokens += driver.step(rows={slot: 1}, **fields).token_ids.tolist()
        fields = {}
    return tokens


def calm(driver: Driver, prompt: list[int] = PROMPT) -> list[int]:
    """The tokens after a prompt that is computed whole, alone, in blocks of its own."""
    blocks = list(range(50, 56))
    first = driver.step(sequence(3, prompt, blocks), rows={3: len(prompt)}).token_ids
    tokens = decode(driver, 3, int(first[0]))
    driver.step(rows={}, freed_slots=column(3))
    return tokens


def continued(slot: int, known: list[int], blocks: list[int], num_computed: int) -> NewSequence:
    """A sequence of PROMPT that has blocks for its first tokens."""
    return replace(
        sequence(slot, known, blocks),
        num_prompt_tokens=len(PROMPT),
        num_computed_tokens=num_computed,
    )


def test_the_cache_takes_a_byte_for_a_number(
    driver: Driver, config: WorkerConfig, greedy: Greedy
) -> None:
    cache = driver.runner.kv_cache
    kind = torch.float8_e4m3fn if config.kv_cache_dtype == "fp8_e4m3" else torch.float8_e5m2
    assert cache.dtype == kind
    assert cache.rows(0).nbytes == cache.rows(0).numel()
    # Rounding shows in a model as random as this: the mode is on.
    prompts = [make_prompt(30, seed=seed) for seed in range(12)]
    assert any(calm(driver, prompt) != greedy(prompt, NUM_TOKENS) for prompt in prompts)


@pytest.mark.parametrize("chunk", [7, 16, 33])
def test_a_chunked_prompt_gives_the_tokens_of_a_whole_one(driver: Driver, chunk: int) -> None:
    expected = calm(driver)
    new: tuple[NewSequence, ...] = (sequence(0, PROMPT, [1, 2, 3, 4, 5]),)
    for begin in range(0, len(PROMPT), chunk):
        output = driver.step(*new, rows={0: min(chunk, len(PROMPT) - begin)})
        new = ()
    assert decode(driver, 0, int(output.token_ids[-1])) == expected


def test_a_prefix_hit_gives_the_tokens_of_a_cold_prompt(driver: Driver) -> None:
    expected = calm(driver)
    driver.step(sequence(0, PROMPT, [1, 2, 3, 4, 5]), rows={0: 70})
    hit = continued(1, PROMPT, [1, 2, 3, 4, 6], 64)
    output = driver.step(hit, rows={1: 6}, freed_slots=column(0))
    assert decode(driver, 1, int(output.token_ids[0])) == expected


def test_prompts_chunks_and_decodes_of_one_step_do_not_disturb_each_other(driver: Driver) -> None:
    others = [make_prompt(33, seed=1), make_prompt(9, seed=2)]
    expected = [calm(driver, prompt) for prompt in (PROMPT, *others)]
    tokens: list[list[int]] = [[], [], []]

    def note(slots: list[int], output: np.ndarray) -> None:
        for slot, token in zip(slots, output.tolist(), strict=True):
            tokens[slot].append(token)

    first = sequence(0, PROMPT, [1, 2, 3, 4, 5])
    driver.step(first, rows={0: 40})
    note([1], driver.step(sequence(1, others[0], [6, 7, 8]), rows={1: 33, 0: 10}).token_ids[:1])
    output = driver.step(sequence(2, others[1], [9, 10]), rows={1: 1, 0: 20, 2: 9})
    note([1, 0, 2], output.token_ids)
    for _ in range(NUM_TOKENS - 1):
        note([0, 1, 2], driver.step(rows={0: 1, 1: 1, 2: 1}).token_ids)
    assert [found[:NUM_TOKENS] for found in tokens] == expected


def test_a_preempted_sequence_is_recomputed_to_the_same_tokens(driver: Driver) -> None:
    expected = calm(driver)
    output = driver.step(sequence(0, PROMPT, [1, 2, 3, 4, 5]), rows={0: 70})
    tokens = decode(driver, 0, int(output.token_ids[0]))[:3]
    driver.step(rows={}, freed_slots=column(0))
    again = continued(0, PROMPT + tokens, [9, 8, 7, 6, 5], 0)
    output = driver.step(again, rows={0: 73})
    rest = decode(driver, 0, int(output.token_ids[0]))
    assert tokens + rest[: NUM_TOKENS - 3] == expected


def test_a_swapped_sequence_goes_on_in_other_blocks(driver: Driver) -> None:
    expected, stranger = calm(driver), make_prompt(70, seed=8)
    output = driver.step(sequence(0, PROMPT, [1, 2, 3, 4, 5]), rows={0: 70})
    tokens = output.token_ids.tolist()
    nothing = column()
    out = StepMoves(
        column(1, 2, 3, 4, 5), column(4, 0, 2, 1, 3), nothing, nothing, nothing, nothing
    )
    other = sequence(1, stranger, [5, 4, 3, 2, 1])
    driver.step(other, rows={1: 70}, freed_slots=column(0), moves=out)
    back = StepMoves(
        nothing, nothing, column(4, 0, 2, 1, 3), column(11, 12, 13, 14, 15), nothing, nothing
    )
    again = continued(0, PROMPT + tokens, [11, 12, 13, 14, 15], 70)
    output = driver.step(again, rows={0: 1}, freed_slots=column(1), moves=back)
    assert (tokens + decode(driver, 0, int(output.token_ids[0])))[:NUM_TOKENS] == expected


def test_a_fork_goes_on_from_a_copy_of_the_last_block(driver: Driver) -> None:
    expected = calm(driver)
    driver.step(sequence(0, PROMPT, [1, 2, 3, 4, 5]), rows={0: 70})
    nothing = column()
    copy = StepMoves(nothing, nothing, nothing, nothing, column(5), column(20))
    fork = continued(1, PROMPT, [1, 2, 3, 4, 20], 69)
    output = driver.step(fork, rows={1: 1}, moves=copy)
    assert decode(driver, 1, int(output.token_ids[0])) == expected


def test_a_row_that_is_not_finite_fails_alone(
    config: WorkerConfig, implementation: str, llama_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((llama_folder / "config.json").read_bytes())
    weights = load_file(llama_folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = float("inf")
    save_file(weights, tmp_path / "model.safetensors")
    driver = Driver(build(config, tmp_path))
    healthy = [token for token in PROMPT if token != POISON]
    expected, poisoned = calm(driver, healthy), [*healthy[:5], POISON, 7]
    new = [sequence(0, healthy, [1, 2, 3, 4, 5]), sequence(1, poisoned, [6])]
    output = driver.step(*new, rows={0: len(healthy), 1: 7})
    assert output.row_status.tolist() == [0, 1]
    assert output.token_ids[0] == expected[0]


def with_scales(folder: Path, to: Path, scales: dict[str, torch.Tensor]) -> Path:
    (to / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(load_file(folder / "model.safetensors") | scales, to / "model.safetensors")
    return to


def test_two_ranks_give_the_tokens_of_one(
    config: WorkerConfig, implementation: str, llama_folder: Path, tmp_path: Path
) -> None:
    """With a scale for each head, of which each rank has its own."""
    names = [f"model.layers.{i}.self_attn.{side}_scale" for i in range(2) for side in "kv"]
    scales = {name: torch.tensor([0.02, 0.5]) * (1 + i) for i, name in enumerate(names)}
    folder = with_scales(llama_folder, tmp_path, scales)
    expected = calm(Driver(build(config, folder)))
    found = on_ranks(2, lambda group: calm(Driver(build(config, folder, group))))
    assert found == [expected, expected]
