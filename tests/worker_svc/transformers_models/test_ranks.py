"""Models that transformers computes, divided among ranks by the plan of their class."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.worker_svc.parallel.test_tensor_parallel import column, on_ranks, sequence
from tests.worker_svc.quantized_checkpoints import FORMATS, save_quantized
from tests.worker_svc.transformers_models.families import (
    NAMES,
    NATIVE_HYBRIDS,
    Oracle,
    write,
)
from tests.worker_svc.transformers_models.test_refused import changed
from tests.worker_svc.transformers_models.test_served import LENGTHS, NUM_TOKENS, prompt_of
from worker_svc.config import WorkerConfig
from worker_svc.models.spec import UnsupportedModel
from worker_svc.models.stored.weight_files import MissingWeight
from worker_svc.models.weights import UnexpectedWeight
from worker_svc.parallel.group import ALONE, Group, RankFailed
from worker_svc.protocol.step import NewSequence, RowSampling, StepInput
from worker_svc.runner.model_runner import ModelRunner
from worker_svc.startup import kv_sizing, startup
from worker_svc.transformers_models.model import TransformersModel

CONFIG = WorkerConfig(
    device="cpu",
    model_impl="transformers",
    kv_groups="one",  # steps here have one table a sequence; test_lost_ranks.py has several
    block_size=4,
    num_kv_blocks=120,
    max_num_seqs=8,
    max_num_batched_tokens=128,
    max_model_len=64,
)
BLOCKS_EACH = 14  # of the longest sequence, with its tokens
WITHOUT_PLAN = {"opt", "gpt_oss", "lfm2", "qwen3_vl"}
UNDIVIDED = {"granite_hybrid"}  # by layers of ours
PLANNED = [name for name in NAMES if name not in WITHOUT_PLAN]
NATIVE_EXPERTS = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "minimax_m2")
# With 4 ranks and 2 KV heads two ranks have the same ones.
CASES = [
    *((name, 2, "transformers") for name in PLANNED),
    *((name, 4, "transformers") for name in ("mistral", "gemma4", "mixtral")),
    *((name, 2, "native") for name in NATIVE_HYBRIDS if name not in UNDIVIDED),
    ("granite", 2, "native"),
    *((name, 2, "native") for name in NATIVE_EXPERTS),
    ("deepseek_v3", 4, "native"),
    ("gemma4", 4, "native"),
    ("gemma4_moe", 2, "native"),
    ("minimax_m2", 4, "native"),
]
GREEDY = RowSampling()
WIDE = {"hidden_size": 64, "head_dim": 16}


def load(folder: Path, group: Group = ALONE, **options: Any) -> startup.LoadedModel:
    config = replace(CONFIG, **options)
    return group.together(lambda: startup.load(config, folder, "float32", "", group))


def model_of(folder: Path, group: Group = ALONE, **options: Any) -> TransformersModel:
    model = load(folder, group, **options).decoder
    assert isinstance(model, TransformersModel)
    return model


def greedy(
    folder: Path, prompts: list[list[int]], group: Group = ALONE, **options: Any
) -> list[list[int]]:
    """Tokens of prompts, of which half are computed while the others decode."""
    runner = startup.build_runner(CONFIG, load(folder, group, **options), CONFIG.num_kv_blocks)
    half = len(prompts) // 2
    found: list[list[int]] = [[] for _ in prompts]
    step(runner, 1, prompts, range(half), found, is_new=True)
    step(runner, 2, prompts, range(half, len(prompts)), found, is_new=True, others=half)
    for step_id in range(3, 2 + NUM_TOKENS):
        step(runner, step_id, prompts, range(len(prompts)), found)
    return [tokens[:NUM_TOKENS] for tokens in found]


def step(
    runner: ModelRunner,
    step_id: int,
    prompts: list[list[int]],
    rows: range,
    found: list[list[int]],
    is_new: bool = False,
    others: int = 0,
) -> None:
    """Computes rows, and one token each of so many others before them."""
    new = tuple(new_sequence(row, prompts[row]) for row in rows) if is_new else ()
    lengths = [len(prompts[row]) if is_new else 1 for row in rows]
    slots = [*range(others), *rows]
    output = runner.execute(
        StepInput(
            step_id=step_id,
            reset=step_id == 1,
            new_sequences=new,
            slots=column(*slots),
            num_scheduled=column(*[1] * others, *lengths),
        )
    )
    assert output.error == ""
    for slot, token in zip(slots, output.token_ids.tolist(), strict=True):
        found[slot].append(token)


def new_sequence(slot: int, prompt: list[int]) -> NewSequence:
    first = 1 + slot * BLOCKS_EACH
    return sequence(slot, prompt, [*range(first, first + BLOCKS_EACH)], GREEDY)


@pytest.mark.parametrize(("name", "size", "implementation"), CASES)
def test_every_rank_gives_the_tokens_of_transformers_eight_at_a_time(
    name: str, size: int, implementation: str, tmp_path: Path
) -> None:
    folder = write(name, tmp_path / name)
    oracle = Oracle(name, folder)
    prompts = [prompt_of(length) for length in LENGTHS] * 2
    wanted = [oracle(prompt, NUM_TOKENS) for prompt in prompts[: len(LENGTHS)]] * 2
    assert oracle.smallest_lead > 1e-4, "another draw of weights would have clearer winners"

    def tokens(group: Group = ALONE) -> list[list[int]]:
        return greedy(folder, prompts, group, model_impl=implementation)

    if implementation == "native":  # test_served.py has the others
        assert tokens() == wanted
    assert on_ranks(size, tokens) == [wanted] * size


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("smollm3", {"tie_word_embeddings": True, "attention_bias": True}),
        ("cohere2", {"tie_word_embeddings": True, "attention_bias": True}),
        ("granite", {"vocab_size": 129, "attention_bias": True, "mlp_bias": True}),  # odd
    ],
)
def test_tied_heads_biases_and_a_vocabulary_that_does_not_divide(
    name: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    folder = write(name, tmp_path / name, sizes)
    give_biases(folder)
    prompts = [prompt_of(length) for length in LENGTHS]
    wanted = [Oracle(name, folder)(prompt, NUM_TOKENS) for prompt in prompts]
    assert on_ranks(2, lambda group: greedy(folder, prompts, group)) == [wanted] * 2


def test_biases_of_convolutions_are_divided_and_added_once(tmp_path: Path) -> None:
    folder = write("lfm2", tmp_path / "lfm2", {"conv_bias": True})
    give_biases(folder)
    prompts = [prompt_of(length) for length in LENGTHS]
    wanted = [Oracle("lfm2", folder)(prompt, NUM_TOKENS) for prompt in prompts]

    def tokens(group: Group = ALONE) -> list[list[int]]:
        return greedy(folder, prompts, group, model_impl="native")

    assert tokens() == wanted
    assert on_ranks(2, tokens) == [wanted] * 2


def give_biases(folder: Path) -> None:
    """Makes the biases of a checkpoint other than 0."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    biases = [p for name, p in model.named_parameters() if name.endswith(".bias")]
    assert biases
    with torch.no_grad():
        for bias in biases:
            bias.normal_(0.0, 0.5)
    model.save_pretrained(folder)


def test_a_rank_has_its_part_of_what_its_plan_divides_and_the_whole_of_the_rest(
    tmp_path: Path,
) -> None:
    folder = write("qwen3_moe", tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    first, second = on_ranks(2, lambda group: parameters_of(model_of(folder, group)))
    parts = {name: (first[name], second[name]) for name in first}

    def whole(*names: str) -> list[torch.Tensor]:
        return [stored[f"model.layers.1.{name}.weight"] for name in names]

    def halves(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return parts[f"layers.1.{name}"]

    (output,) = whole("self_attn.o_proj")
    assert torch.equal(torch.cat(halves("self_attn.o_proj.weight"), 1), output)
    (keys,) = whole("self_attn.k_proj")
    assert torch.equal(torch.cat(halves("self_attn.k_proj.weight")), keys)
    norm, same = halves("self_attn.q_norm.weight")
    assert torch.equal(norm, same)
    gates, ups, downs = (
        torch.stack(whole(*(f"mlp.experts.{expert}.{name}_proj" for expert in range(4))))
        for name in ("gate", "up", "down")
    )
    both = [half.chunk(2, dim=1) for half in halves("mlp.experts.gate_up_proj")]
    for ranks, wanted in zip(zip(*both, strict=True), (gates, ups), strict=True):
        assert torch.equal(torch.cat(ranks, dim=1), wanted)
    assert torch.equal(torch.cat(halves("mlp.experts.down_proj"), dim=2), downs)


def parameters_of(model: TransformersModel) -> dict[str, torch.Tensor]:
    return dict(model._layers.named_parameters())


def test_random_weights_are_the_parts_of_those_of_one_rank(tmp_path: Path) -> None:
    folder = write("gemma2", tmp_path / "model")
    (folder / "model.safetensors").unlink()
    hidden = torch.randn(3, 48)
    whole = model_of(folder, load_format="dummy")

    def on_rank(group: Group) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        model = model_of(folder, group, load_format="dummy")
        return parameters_of(model), model.logits(hidden)

    (first, logits), (second, same) = on_ranks(2, on_rank)
    torch.testing.assert_close(logits, whole.logits(hidden))
    assert torch.equal(logits, same)
    name = "layers.2.self_attn.q_proj.weight"
    assert torch.equal(torch.cat((first[name], second[name])), parameters_of(whole)[name])


@pytest.mark.parametrize("stored_as", ["awq", "fp8-block"])
def test_a_quantized_checkpoint_is_divided_as_a_plain_one(stored_as: str, tmp_path: Path) -> None:
    plain = write("olmo2", tmp_path / "plain", {**WIDE, "intermediate_size": 128})
    save_quantized(plain, tmp_path / "stored", tmp_path / "twin", FORMATS[stored_as])
    prompts = [prompt_of(length) for length in LENGTHS]
    wanted = greedy(tmp_path / "stored", prompts)
    found = on_ranks(2, lambda group: greedy(tmp_path / "stored", prompts, group))
    assert found == [wanted] * 2


def test_ranks_have_as_many_snapshots_of_states_as_the_one_with_the_least_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write("qwen3_5", tmp_path / "model")
    numbers = itertools.count(5)
    monkeypatch.setattr(kv_sizing, "num_state_snapshots", lambda *_: next(numbers))

    def on_rank(group: Group) -> int:
        runner = startup.build_runner(CONFIG, load(folder, group), CONFIG.num_kv_blocks)
        return runner.limits.num_state_snapshots

    first, second = on_ranks(2, on_rank)
    assert first == second >= 5


# --- refusals ------------------------------------------------------------------------------------


def refused(folder: Path, size: int = 2, **options: Any) -> str:
    """The message with which the ranks refuse a model."""

    def on_rank(group: Group) -> str:
        with pytest.raises((UnsupportedModel, RankFailed)) as raised:
            load(folder, group, **options)
        return str(raised.value)

    return on_ranks(size, on_rank)[0]


@pytest.mark.parametrize("name", sorted(WITHOUT_PLAN))
def test_a_class_without_a_plan_is_refused_by_name(name: str, tmp_path: Path) -> None:
    said = refused(write(name, tmp_path / name))
    assert said.startswith("tensor_parallel_size: 2: ")
    assert said.endswith("brings no tp_plan for its layers")


@pytest.mark.parametrize(
    ("name", "sizes", "size", "named"),
    [
        ("granite", {"num_attention_heads": 6}, 4, "num_attention_heads: 6 does not divide"),
        (
            "granite",
            {"num_attention_heads": 12, "num_key_value_heads": 3},
            4,
            "num_key_value_heads: 3 and tensor_parallel_size 4",
        ),
        ("granite", {"intermediate_size": 63}, 2, "gate_proj.weight: 63 does not divide"),
        ("mixtral", {"intermediate_size": 63}, 2, "experts.gate_up_proj: 126 does not divide"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_by_name(
    name: str, sizes: dict[str, Any], size: int, named: str, tmp_path: Path
) -> None:
    folder = write(name, tmp_path / name, sizes)
    assert named in refused(folder, size)


@pytest.mark.parametrize(
    ("entry", "style", "named"),
    [
        ("layers.*.mlp.up_proj", "sideways", "mlp.up_proj: 'sideways' of its tp_plan"),
        ("layers.*.input_layernorm", "colwise", "input_layernorm is no plain linear layer"),
        ("layers.*.mlp", "moe_tp_experts", "is not divided by its tp_plan"),
    ],
)
def test_a_plan_that_is_not_served_is_refused_by_name(
    entry: str, style: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write("granite", tmp_path / "model")
    made = transformers.GraniteConfig
    plan = {key: value for key, value in made.base_model_tp_plan.items() if "mlp" not in key}
    monkeypatch.setattr(made, "base_model_tp_plan", {**plan, entry: style})
    said = refused(folder)
    assert "GraniteForCausalLM" in said
    assert named in said


def test_a_head_that_looks_at_the_whole_vocabulary_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write("granite", tmp_path / "model")
    made = transformers.GraniteForCausalLM
    forward: Callable[..., Any] = made.forward

    def normalized(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.logits = output.logits.log_softmax(-1)
        return output

    monkeypatch.setattr(made, "forward", normalized)
    assert "its logits cannot be computed by parts of the vocabulary" in refused(folder)
    assert model_of(folder).config.architecture == "GraniteForCausalLM"


def test_a_checkpoint_that_lacks_a_tensor_or_has_one_too_many(tmp_path: Path) -> None:
    folder = write("granite", tmp_path / "model")
    with_more = changed(folder, tmp_path / "more")
    tensors = load_file(folder / "model.safetensors")
    extra = {"v_head.weight": torch.zeros(3)}
    save_file(tensors | extra, with_more / "model.safetensors", {"format": "pt"})

    def on_rank(group: Group) -> str:
        with pytest.raises(UnexpectedWeight) as raised:
            load(with_more, group)
        load(with_more, group, ignore_weights=("v_head.*",))
        return str(raised.value)

    assert all("v_head.weight" in said for said in on_ranks(2, on_rank))
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    def lacking(group: Group) -> None:
        with pytest.raises(MissingWeight, match=r"layers\.1\.mlp\.up_proj\.weight not found"):
            load(folder, group)

    on_ranks(2, lacking)


def test_a_rank_that_cannot_read_its_part_stops_the_others_before_they_compute(
    tmp_path: Path,
) -> None:
    folder = write("granite", tmp_path / "whole")
    broken = changed(folder, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"\0" * 64)

    def on_rank(group: Group) -> int:
        with pytest.raises((RankFailed, ValueError)):
            load(broken if group.rank else folder, group)
        return group.num_collectives

    assert on_ranks(2, on_rank) == [0, 0]
