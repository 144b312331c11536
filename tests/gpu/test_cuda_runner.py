"""CUDA runner: graphs, two steps in flight, sampling on the device, against transformers."""

import dataclasses
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.worker_svc.random_models import Family, save_random_model
from wire.state_hash import block_weights, slot_hashes
from worker_svc.config import WorkerConfig
from worker_svc.parallel.vocab_part import VocabPart
from worker_svc.protocol.step import NewSequence, RowSampling, StepInput, StepOutput
from worker_svc.runner.model_runner import ModelRunner
from worker_svc.startup import startup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

VOCAB_SIZE = 128
GREEDY = RowSampling()
MAX_NUM_SEQS = 19
BLOCKS_PER_SEQ = 12
CONFIG = WorkerConfig(
    dtype="float32",
    device="cuda",
    num_kv_blocks=1 + MAX_NUM_SEQS * BLOCKS_PER_SEQ,
    max_num_seqs=MAX_NUM_SEQS,
    max_num_batched_tokens=512,
    max_model_len=192,
)
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "head_dim": 16,
}
NO_IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
FAMILIES: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama": ((LlamaConfig, LlamaForCausalLM), {}),
    "llama-biases": (
        (LlamaConfig, LlamaForCausalLM),
        {"attention_bias": True, "mlp_bias": True},
    ),
    "mistral": ((MistralConfig, MistralForCausalLM), {"sliding_window": None}),
    "mistral-window": ((MistralConfig, MistralForCausalLM), {"sliding_window": 21}),
    "gemma2": ((Gemma2Config, Gemma2ForCausalLM), NO_IDS | {"sliding_window": 21}),
    "gemma3": (
        (Gemma3TextConfig, Gemma3ForCausalLM),
        NO_IDS | {"sliding_window": 21, "num_hidden_layers": 3, "sliding_window_pattern": 2},
    ),
    "qwen2": ((Qwen2Config, Qwen2ForCausalLM), {}),
    "qwen3": ((Qwen3Config, Qwen3ForCausalLM), {"tie_word_embeddings": True}),
}


@dataclasses.dataclass
class Checkpoint:
    """A random model of a family: its folder, and the transformers model."""

    folder: Path
    model: PreTrainedModel

    @torch.inference_mode()
    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        token_ids = torch.tensor([prompt], device="cuda")
        for _ in range(num_tokens):
            chosen = self.model(token_ids).logits[:, -1:].argmax(-1)
            token_ids = torch.cat((token_ids, chosen), 1)
        return token_ids[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    made: dict[str, Checkpoint] = {}

    def make(name: str) -> Checkpoint:
        if name not in made:
            family, changes = FAMILIES[name]
            folder = tmp_path_factory.mktemp("models") / name
            model = save_random_model(folder, family, SHAPE | changes)
            made[name] = Checkpoint(folder, model.cuda())
        return made[name]

    return make


@pytest.fixture(scope="module")
def runner(checkpoint: Callable[[str], Checkpoint]) -> ModelRunner:
    """A float32 runner of the Llama, after its warm-up."""
    return make_runner(checkpoint("llama").folder, CONFIG)


def make_runner(folder: Path, config: WorkerConfig) -> ModelRunner:
    loaded = startup.load(config, folder, config.dtype, "")
    runner = startup.build_runner(config, loaded, config.num_kv_blocks)
    runner.warm_up()
    return runner


def column(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def make_prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).tolist()


class Client:
    """Keeps two steps in flight, as a scheduler does, and collects the tokens of each slot."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.tokens: dict[int, list[int]] = {}
        self.statuses: list[list[int] | None] = []
        self._pending: deque[tuple[list[int], Any]] = deque()
        self._step_id = 0

    def enter(self, slot: int, prompt: list[int], sampling: RowSampling) -> NewSequence:
        self.tokens[slot] = []
        return NewSequence(
            slot=slot,
            request_id=f"request-{slot}",
            token_ids=np.array(prompt, dtype=np.int32),
            num_prompt_tokens=len(prompt),
            num_computed_tokens=0,
            block_ids=np.arange(BLOCKS_PER_SEQ, dtype=np.int32) + 1 + slot * BLOCKS_PER_SEQ,
            sampling=sampling,
        )

    def launch(self, rows: dict[int, int], sampled: list[int] | None = None, **fields: Any) -> None:
        """Launches a step; `sampled` are its slots that sample a token, by default all."""
        self._step_id += 1
        step = StepInput(
            step_id=self._step_id,
            reset=self._step_id == 1,
            slots=column([] if fields.get("same_rows") else list(rows)),
            num_scheduled=column([] if fields.get("same_rows") else list(rows.values())),
            **fields,
        )
        launched = self.runner.launch(step)
        self._pending.append((list(rows) if sampled is None else sampled, launched))
        while len(self._pending) > 1:
            self.collect()

    def collect(self) -> StepOutput:
        slots, launched = self._pending.popleft()
        output = launched if isinstance(launched, StepOutput) else launched.result()
        if not isinstance(launched, StepOutput):
            launched.record(output)
        if not output.error:
            for slot, token in zip(slots, output.token_ids.tolist(), strict=True):
                self.tokens[slot].append(token)
            self.statuses.append(None if output.row_status is None else output.row_status.tolist())
        return output

    def drain(self) -> None:
        while self._pending:
            self.collect()


def generate(
    runner: ModelRunner,
    prompts: dict[int, list[int]],
    num_tokens: int,
    sampling: RowSampling | dict[int, RowSampling] = GREEDY,
) -> dict[int, list[int]]:
    """Prefills all slots at once and decodes with two steps in flight."""
    client = Client(runner)
    how = sampling if isinstance(sampling, dict) else dict.fromkeys(prompts, sampling)
    new = tuple(client.enter(slot, prompt, how[slot]) for slot, prompt in prompts.items())
    client.launch({slot: len(prompt) for slot, prompt in prompts.items()}, new_sequences=new)
    for index in range(num_tokens - 1):
        client.launch(dict.fromkeys(prompts, 1), same_rows=index > 0)
    client.drain()
    return client.tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_outputs_are_those_of_transformers(
    checkpoint: Callable[[str], Checkpoint], family: str
) -> None:
    theirs = checkpoint(family)
    runner = make_runner(theirs.folder, CONFIG)
    assert runner.graph_batch_sizes == (1, 2, 4, 8, 16, 19)
    prompts = {slot: make_prompt(3 + 17 * slot, seed=slot) for slot in (4, 0, 2)}
    expected = {slot: theirs.greedy(prompt, 64) for slot, prompt in prompts.items()}
    assert generate(runner, prompts, 64) == expected


@pytest.mark.parametrize("num_rows", range(1, MAX_NUM_SEQS + 1))
def test_every_batch_size_gives_each_row_its_own_tokens(
    checkpoint: Callable[[str], Checkpoint], runner: ModelRunner, num_rows: int
) -> None:
    theirs = checkpoint("llama")
    prompts = {slot: make_prompt(5 + slot % 4, seed=slot % 4) for slot in range(num_rows)}
    expected = {slot: theirs.greedy(prompts[slot], 6) for slot in list(prompts)[:4]}
    tokens = generate(runner, prompts, 6)
    assert tokens == {slot: expected[slot % 4] for slot in prompts}


def test_chunks_and_decodes_share_steps(
    checkpoint: Callable[[str], Checkpoint], runner: ModelRunner
) -> None:
    first, second = make_prompt(20, seed=1), make_prompt(70, seed=2)
    client = Client(runner)
    client.launch({0: 20}, new_sequences=(client.enter(0, first, GREEDY),))
    entering = client.enter(5, second, GREEDY)
    client.launch({0: 1, 5: 30}, sampled=[0], new_sequences=(entering,))
    client.launch({5: 30}, sampled=[])
    client.launch({0: 1, 5: 10})
    for _ in range(10):
        client.launch({5: 1, 0: 1})
    client.drain()
    assert client.tokens[0] == checkpoint("llama").greedy(first, 13)
    assert client.tokens[5] == checkpoint("llama").greedy(second, 11)


SAMPLINGS = {
    "plain": RowSampling(temperature=1.0, seed=5),
    "filtered": RowSampling(temperature=0.8, top_k=30, top_p=0.9, min_p=0.01, seed=2**64 - 7),
    "short": RowSampling(temperature=1.0, seed=9, min_tokens=5, stop_token_ids=(7, 8)),
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_seed_gives_the_same_tokens_alone_among_others_and_after_a_preemption(
    runner: ModelRunner, name: str
) -> None:
    sampling, prompt = SAMPLINGS[name], make_prompt(11)
    (alone,) = generate(runner, {3: prompt}, 12, sampling).values()
    crowd = {slot: make_prompt(4 + slot, seed=slot) for slot in range(9)} | {6: prompt}
    how = {slot: RowSampling(temperature=1.0, seed=slot) for slot in crowd}
    assert generate(runner, crowd, 12, how | {6: sampling})[6] == alone
    client = Client(runner)
    entering = client.enter(1, prompt + alone[:5], sampling)
    resumed = dataclasses.replace(entering, num_prompt_tokens=len(prompt))
    client.launch({1: len(prompt) + 5}, new_sequences=(resumed,))
    for _ in range(6):
        client.launch({1: 1})
    client.drain()
    assert client.tokens[1] == alone[5:]
    assert len(set(alone)) > 3


def test_logprobs_and_rules_run_on_the_device(
    checkpoint: Callable[[str], Checkpoint], runner: ModelRunner
) -> None:
    client = Client(runner)
    asking = RowSampling(num_top_logprobs=3, logit_bias=((50, 100.0),))
    new = (
        client.enter(0, make_prompt(9), asking),
        client.enter(1, make_prompt(9), GREEDY),
    )
    client.launch({0: 9, 1: 9}, new_sequences=new)
    output = client.collect()
    assert output.token_ids[0] == 50
    assert output.token_ids[1] != 50
    with torch.inference_mode():
        prompt = torch.tensor([make_prompt(9)], device="cuda")
        expected = checkpoint("llama").model(prompt).logits[0, -1].log_softmax(-1)
    assert output.logprobs is not None
    assert output.logprobs.rows.tolist() == [0]
    assert output.logprobs.logprobs.tolist() == pytest.approx([float(expected[50])], abs=1e-4)
    assert output.logprobs.top_token_ids.tolist() == [expected.topk(3).indices.tolist()]


def test_a_failed_launch_leaves_no_trace(
    checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = checkpoint("llama")
    runner = make_runner(theirs.folder, CONFIG)
    prompt, other = make_prompt(10), make_prompt(6, seed=3)
    client = Client(runner)
    client.launch({0: 10}, new_sequences=(client.enter(0, prompt, GREEDY),))
    for _ in range(3):
        client.launch({0: 1})
    client.drain()
    with monkeypatch.context() as broken:

        def out_of_memory(*_: object) -> torch.Tensor:
            raise torch.OutOfMemoryError("no memory")

        broken.setattr(runner._step_graphs, "begin", out_of_memory)
        client.launch({0: 1, 1: 6}, new_sequences=(client.enter(1, other, GREEDY),))
        assert "no memory" in client.collect().error
    client.launch({0: 1, 1: 6}, new_sequences=(client.enter(1, other, GREEDY),))
    for _ in range(4):
        client.launch({0: 1, 1: 1})
    client.drain()
    assert client.tokens == {0: theirs.greedy(prompt, 9), 1: theirs.greedy(other, 5)}


def test_a_row_that_is_not_finite_fails_alone(
    checkpoint: Callable[[str], Checkpoint],
) -> None:
    theirs = checkpoint("llama")
    runner = make_runner(theirs.folder, CONFIG)
    with torch.inference_mode():
        runner._model._embedding.table[99] = float("nan")
    prompts = [make_prompt(8, seed=1), [5, 99, 6]]
    client = Client(runner)
    new = tuple(client.enter(slot, p, GREEDY) for slot, p in enumerate(prompts))
    client.launch({0: 8, 1: 3}, new_sequences=new)
    client.launch({0: 1, 1: 1})
    client.launch({0: 1, 1: 1}, same_rows=True)
    client.drain()
    assert client.statuses == [[0, 1]] * 3
    assert client.tokens[0] == theirs.greedy(prompts[0], 3)


def test_the_cache_is_sized_so_that_serving_fits(checkpoint: Callable[..., Checkpoint]) -> None:
    """A fifth of what is free is taken, whatever other processes hold of the device."""
    torch.cuda.empty_cache()
    reserved, (free, total) = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()
    share = 1 - 0.8 * free / total
    config = dataclasses.replace(CONFIG, num_kv_blocks=0, gpu_memory_utilization=share)
    runner = make_runner(checkpoint("qwen3").folder, config)
    assert runner.limits.num_blocks > 1000
    assert torch.cuda.memory_reserved() - reserved < 0.25 * free
    del runner
    torch.cuda.empty_cache()


def distance_of_logits(runner: ModelRunner, theirs: torch.nn.Module, prompt: list[int]) -> float:
    """Relative distance of the logits after a prompt from those of transformers."""
    snapshot: list[VocabPart] = []
    runner._step_graphs.map = lambda rows: None  # so that the model is launched now
    vocab_part = runner._model.vocab_part
    runner._model.vocab_part = lambda hidden: snapshot.append(vocab_part(hidden)) or snapshot[-1]
    client = Client(runner)
    client.launch({0: len(prompt)}, new_sequences=(client.enter(0, prompt, GREEDY),))
    client.drain()
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt], device="cuda")).logits[0, -1]
    return float((snapshot[0].logits[0].float() - expected).norm() / expected.norm())


def test_bfloat16_logits_are_close_to_those_of_float32(
    checkpoint: Callable[[str], Checkpoint],
) -> None:
    theirs = checkpoint("qwen3")
    runner = make_runner(theirs.folder, dataclasses.replace(CONFIG, dtype="bfloat16"))
    assert distance_of_logits(runner, theirs.model, make_prompt(40)) < 0.05


def test_the_devices_copies_have_the_hash_of_what_the_host_knows(runner: ModelRunner) -> None:
    client = Client(runner)
    prompts = {slot: make_prompt(5 + slot, seed=slot) for slot in (0, 3, 7)}
    new = tuple(client.enter(slot, prompt, GREEDY) for slot, prompt in prompts.items())
    client.launch({slot: len(prompt) for slot, prompt in prompts.items()}, new_sequences=new)
    client.launch({0: 1, 3: 1, 7: 1})
    client.drain()
    client.launch({0: 1, 7: 1}, wants_state=True)
    state = client.collect().state
    assert state is not None
    assert state.slots.tolist() == [0, 3, 7]
    weights = block_weights(BLOCKS_PER_SEQ)
    tables = [new[index].block_ids.astype(np.uint64) @ weights for index in range(3)]
    # Slot 3 was idle in this step, so its last computed token is an older one.
    last = [client.tokens[0][1], client.tokens[3][0], client.tokens[7][1]]
    expected = slot_hashes(state.slots, np.array(tables), column([7, 9, 14]), column(last))
    assert state.hashes.tolist() == expected.tolist()
    with torch.inference_mode():
        runner.slots.token_rows[7, 13] += 1  # corrupts the device's state
    client.launch({0: 1, 3: 1}, wants_state=True)
    changed = client.collect().state
    assert changed is not None and changed.hashes[2] != state.hashes[2]


def test_granted_steps_replay_and_give_the_tokens_of_single_ones(runner: ModelRunner) -> None:
    prompts = {slot: make_prompt(4 + slot, seed=slot) for slot in range(5)}
    expected = generate(runner, prompts, 13)
    client = Client(runner)
    new = tuple(client.enter(slot, prompt, GREEDY) for slot, prompt in prompts.items())
    client.launch({slot: len(prompt) for slot, prompt in prompts.items()}, new_sequences=new)
    grant = StepInput(2, slots=column(list(prompts)), granted_steps=12)
    for granted in grant.steps():
        launched = runner.launch(granted)
        assert not isinstance(launched, StepOutput), launched
        client._pending.append((list(prompts), launched))
        while len(client._pending) > 2:
            client.collect()
    client.drain()
    assert client.tokens == expected
