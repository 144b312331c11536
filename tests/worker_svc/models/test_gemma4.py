"""Gemma 4 by layers of ours against transformers, and what its configurations say."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
)

from tests.worker_svc.models.configs import NAMES, published, read
from tests.worker_svc.models.test_models import (
    MAX_MODEL_LEN,
    NO_IDS,
    SHAPE,
    Steps,
    assert_same,
    expected_logits,
    make_prompts,
)
from tests.worker_svc.models.test_windows import (
    FULL,
    LENGTHS,
    SLIDING,
    WINDOW,
    Pair,
    greedy,
    in_chunks,
    made_once,
)
from tests.worker_svc.quantized_checkpoints import FORMATS, save_quantized
from tests.worker_svc.random_models import Family, save_random_model
from worker_svc.models import config as model_config
from worker_svc.models import kernel_limits, load_model
from worker_svc.models.families import gemma, gemma4
from worker_svc.models.rope import ProportionalScaling, RotaryConfig, frequencies
from worker_svc.models.sharding import Sharding
from worker_svc.models.spec import (
    LayerInputsSpec,
    MlpAndExpertsSpec,
    MlpSpec,
    ModelSpec,
    UnsupportedModel,
    stored_places,
)
from worker_svc.models.stored.weight_files import MissingWeight
from worker_svc.models.weights import UnexpectedWeight

CPU = torch.device("cpu")
GEMMA4: Family = (Gemma4TextConfig, Gemma4ForCausalLM)
SIZES = (
    SHAPE
    | NO_IDS
    | {
        "head_dim": 16,
        "global_head_dim": 32,
        "num_key_value_heads": 2,
        "sliding_window": WINDOW,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": SHAPE["vocab_size"],
        "num_hidden_layers": 4,
        "layer_types": [SLIDING, FULL, SLIDING, FULL],
    }
)
SMALL = {
    "hidden_size_per_layer_input": 10,
    "num_hidden_layers": 5,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
    "num_kv_shared_layers": 2,
}
CHECKPOINTS: dict[str, tuple[Family, dict[str, Any]]] = {
    # As 31B: values of layers that see all are their keys, of fewer heads.
    "values-of-keys": (
        GEMMA4,
        {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 4.0,
        },
    ),
    # As 26B-A4B.
    "experts": (
        GEMMA4,
        {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 40,
        },
    ),
    # As E4B, and as E2B, with an odd number of dimensions that do not turn.
    "layer-inputs": (GEMMA4, SMALL | {"attention_bias": True, "tie_word_embeddings": False}),
    "wide-where-shared": (
        GEMMA4,
        SMALL
        | {
            "use_double_wide_mlp": True,
            "attention_k_eq_v": True,
            "rope_parameters": {
                FULL: {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.34,
                    "rope_theta": 1e6,
                },
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    # One size of heads: nothing but its parts says that kernels do not compute it.
    "one-shape": (GEMMA4, {"global_head_dim": 16}),
    # And nothing but the window says which keys and values are those of a layer's type.
    "one-shape-shared": (GEMMA4, SMALL | {"global_head_dim": 16}),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    return made_once(tmp_path_factory, CHECKPOINTS, SIZES)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_of_prompts_chunks_and_single_tokens(
    checkpoint: Callable[[str], Pair], name: str
) -> None:
    """Prompts of two windows and more, cut around a window's length, then token by token."""
    folder, theirs = checkpoint(name)
    ours = load_model(folder, torch.float32, CPU, MAX_MODEL_LEN)
    assert ours.attention_backend == "torch"
    length = 2 * WINDOW + 9
    prompts = make_prompts(*([length] * (len(LENGTHS) + 1)))
    chunks = [[cut, cut, length - 2 * cut - 3, 1, 1, 1] for cut in LENGTHS]
    chunks.append([WINDOW - 2, *[1] * 5, 16, length - WINDOW - 19])
    for prompt, logits in zip(prompts, in_chunks(ours, prompts, chunks), strict=True):
        assert_same(logits, expected_logits(theirs, prompt))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_greedy_tokens_are_those_of_transformers(
    checkpoint: Callable[[str], Pair], name: str
) -> None:
    folder, theirs = checkpoint(name)
    ours = load_model(folder, torch.float32, CPU, MAX_MODEL_LEN)
    (prompt,) = make_prompts(WINDOW - 1)
    expected = greedy(theirs, prompt, 2 * WINDOW)
    steps = Steps(ours, [torch.cat((prompt, torch.tensor(expected)))])
    found = [int(steps.run({0: len(prompt)})[0][-1].argmax())]
    for _ in expected[1:]:
        found.append(int(steps.run({0: 1})[0][-1].argmax()))
    assert found == expected


@pytest.mark.parametrize("name", ["values-of-keys", "layer-inputs"])
def test_16_bits_are_as_near_to_float32_as_those_of_transformers(
    checkpoint: Callable[[str], Pair], name: str
) -> None:
    """Both round as often, at other places. A router may choose another expert after either."""
    folder, exact = checkpoint(name)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ours = load_model(folder, torch.bfloat16, CPU, MAX_MODEL_LEN)
    (prompt,) = make_prompts(40)
    steps = Steps(ours, [prompt])
    found = torch.cat([steps.run({0: count})[0] for count in (30, 1, 9)])
    truth = expected_logits(exact, prompt)
    ours_off, theirs_off = (
        float((logits.float() - truth).square().mean().sqrt())
        for logits in (found, expected_logits(theirs, prompt))
    )
    assert ours_off < 2 * theirs_off < 0.4 * float(truth.square().mean().sqrt())


@pytest.mark.parametrize("name", ["packed", "int8", "fp8-block"])
def test_a_quantized_checkpoint_is_the_numbers_that_it_stands_for(
    name: str, tmp_path: Path
) -> None:
    """The product of keys that are values, too, has parts of queries and keys alone."""
    family, changes = CHECKPOINTS["values-of-keys"]
    sizes = {"hidden_size": 64, "intermediate_size": 96}  # whole groups
    (tmp_path / "plain").mkdir()
    save_random_model(tmp_path / "plain", family, SIZES | changes | sizes)
    folder, twin = tmp_path / "stored", tmp_path / "twin"
    save_quantized(tmp_path / "plain", folder, twin, FORMATS[name])
    (prompt,) = make_prompts(40)
    found, expected = (
        Steps(load_model(each, torch.float32, CPU, MAX_MODEL_LEN), [prompt]).run({0: 40})[0]
        for each in (folder, twin)
    )
    assert_same(found, expected)


def test_only_own_keys_and_values_are_stored(checkpoint: Callable[[str], Pair]) -> None:
    """Three of five layers store, and those with a window are a group of pages of their own."""
    ours = load_model(checkpoint("layer-inputs")[0], torch.float32, CPU, MAX_MODEL_LEN)
    assert stored_places(ours.spec.attentions) == (0, 1, 2, 2, 1)
    assert ours.spec.kv_width == 2 * 2 * (16 + 32 + 16)
    assert ours.kv_layout(8, 16).endswith("= [8, 16, 2, 16] of 2 layers and [8, 16, 2, 32]"
                                          " of 1 layers")  # fmt: skip
    plan = ours.kv_plan(16, MAX_MODEL_LEN)
    assert plan is not None
    assert [place.group for place in plan.places] == [1, 0, 1]
    assert [group.window for group in plan.groups] == [None, WINDOW]


def test_tensors_that_layers_with_others_keys_do_not_read(
    checkpoint: Callable[[str], Pair], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Released files have them; where a layer does read them, they must be there."""
    caplog.set_level("INFO")
    folder, theirs = checkpoint("layer-inputs")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    own, shared = "model.layers.1.self_attn", "model.layers.4.self_attn"
    for name in [name for name in tensors if re.match(rf"{own}\.[kv]_", name)]:
        tensors[name.replace(own, shared)] = torch.full_like(tensors[name], torch.nan)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    ours = load_model(tmp_path, torch.float32, CPU, MAX_MODEL_LEN)
    assert f"other parts of the model are not read: {shared}.k_norm.weight" in caplog.text
    (prompt,) = make_prompts(20)
    assert_same(Steps(ours, [prompt]).run({0: 20})[0], expected_logits(theirs, prompt))
    del tensors[f"{own}.k_norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(MissingWeight, match=r"layers\.1\.self_attn\.k_norm"):
        load_model(tmp_path, torch.float32, CPU, MAX_MODEL_LEN)


def test_the_text_of_a_model_with_pictures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    eyes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "position_embedding_size": 16,
    }
    given = SIZES | SMALL | {"attention_k_eq_v": True, "pad_token_id": 0}
    family: Family = (Gemma4Config, Gemma4ForConditionalGeneration)
    config = {"text_config": given, "vision_config": eyes, "audio_config": None}
    theirs = save_random_model(tmp_path, family, config | {"image_token_id": 90})
    ours = load_model(tmp_path, torch.float32, CPU, MAX_MODEL_LEN)
    assert ours.spec.architecture == "Gemma4ForConditionalGeneration"
    assert "other parts of the model are not read: model.embed_vision" in caplog.text
    (prompt,) = make_prompts(40)
    prompt %= 80  # no tokens of pictures
    steps = Steps(ours, [prompt])
    found = torch.cat([steps.run({0: count})[0] for count in (30, 1, 9)])
    with torch.inference_mode():
        assert_same(found, theirs(input_ids=prompt.unsqueeze(0)).logits[0])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.ear.weight": torch.ones(2)}, file, {"format": "pt"})
    with pytest.raises(UnexpectedWeight, match=r"model\.ear\.weight"):
        load_model(tmp_path, torch.float32, CPU, MAX_MODEL_LEN)


def test_a_part_of_the_pairs_turns_by_the_frequencies_of_the_whole_head() -> None:
    config = RotaryConfig(1e6, ProportionalScaling(0.25))
    found = frequencies(config, 512, 4096)
    torch.testing.assert_close(found[:64], 1e6 ** (-torch.arange(0, 128, 2) / 512))
    assert not found[64:].any()


PUBLISHED = [name for name in NAMES if name.startswith("gemma-4")]


def kv_heads(spec: ModelSpec) -> dict[int | None, tuple[int, int]]:
    """The number and the size of KV heads, by window."""
    return {each.window: (each.num_kv_heads, each.head_dim) for each in spec.attentions}


def test_the_published_configuration_of_31b(tmp_path: Path) -> None:
    spec = read(tmp_path, "gemma-4-31b")
    assert kv_heads(spec) == {1024: (16, 256), None: (4, 512)}
    assert {(each.window, each.v_is_k) for each in spec.attentions} == {(1024, False), (None, True)}
    assert {(each.scale, each.v_norm, each.shares_kv) for each in spec.attentions} == {
        (1.0, True, False)
    }
    assert spec.ropes == {
        gemma.WHOLE: RotaryConfig(1e6, ProportionalScaling(0.25)),
        gemma.NEAR: RotaryConfig(1e4),
    }
    assert (spec.num_layers, spec.max_model_len, spec.logit_softcap) == (60, 262_144, 30.0)
    assert (spec.eos_token_ids, spec.checkpoint_dtype) == ((1, 106), "bfloat16")
    assert (spec.layer_inputs, spec.has_experts) == (None, False)
    assert spec.kv_width == 2 * (50 * 16 * 256 + 10 * 4 * 512)
    ranks = Sharding(spec, 7, 8).spec  # with two ranks to each of four KV heads
    assert kv_heads(ranks) == {1024: (2, 256), None: (1, 512)}
    for lacking in (
        kernel_limits.beyond_c(spec),
        kernel_limits.beyond_triton(spec, 1),
        kernel_limits.beyond_composed(spec),
    ):
        assert lacking.startswith("attention of several shapes and norms of values")


def test_the_published_configuration_of_26b(tmp_path: Path) -> None:
    spec = read(tmp_path, "gemma-4-26b-a4b")
    assert kv_heads(spec) == {1024: (8, 256), None: (2, 512)}
    (feed,) = {layer.feed for layer in spec.layers}
    assert isinstance(feed, MlpAndExpertsSpec)
    assert feed.mlp.intermediate_size == 2112
    router = feed.experts.router
    assert (router.num_experts, router.top_k, router.renormalizes) == (128, 8, True)
    assert feed.experts.intermediate_size == 704
    part = Sharding(spec, 0, 2).spec.layers[0].feed
    assert isinstance(part, MlpAndExpertsSpec)
    assert (part.mlp.intermediate_size, part.experts.intermediate_size) == (1056, 352)


@pytest.mark.parametrize("is_wide", [False, True])
def test_the_published_configuration_of_e4b(tmp_path: Path, is_wide: bool) -> None:
    spec = read(tmp_path, "gemma-4-e4b", use_double_wide_mlp=is_wide)
    assert kv_heads(spec) == {512: (2, 256), None: (2, 512)}
    assert spec.layer_inputs == LayerInputsSpec(256, 262_144)
    assert [each.shares_kv for each in spec.attentions] == [False] * 24 + [True] * 18
    assert set(stored_places(spec.attentions)[24:]) == {22, 23}
    sizes = [
        layer.feed.intermediate_size for layer in spec.layers if isinstance(layer.feed, MlpSpec)
    ]
    assert sizes == [10240] * 24 + [20480 if is_wide else 10240] * 18
    inputs = Sharding(spec, 1, 2).spec.layer_inputs
    assert inputs == LayerInputsSpec(256, 131_072)
    for part in ("vision_tower.a", "embed_audio.b", "language_model.layers.24.self_attn.k_norm.c"):
        assert re.fullmatch(spec.other_parts, f"model.{part}")
    assert not re.fullmatch(spec.other_parts, "model.language_model.layers.23.self_attn.k_norm.c")
    assert not re.fullmatch(spec.other_parts, "model.language_model.layers.24.self_attn.q_norm.c")


@pytest.mark.parametrize("name", PUBLISHED)
def test_layers_with_a_window_have_pages_of_their_own(name: str, tmp_path: Path) -> None:
    spec = read(tmp_path, name)
    plan = spec.kv_plan(16, 32_768, torch.bfloat16)
    assert plan is not None
    window = published(name)["text_config"]["sliding_window"]
    assert sorted(group.window or 0 for group in plan.groups) == [0, window]
    assert len(plan.places) == len(spec.stored)


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_transformers_saves_of_a_published_configuration_is_the_same_model(
    name: str, tmp_path: Path
) -> None:
    expected = read(tmp_path, name)
    Gemma4Config(**published(name)).save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert "per_layer_config" in saved["text_config"]
    found = model_config.load(tmp_path / "saved")
    assert found == expected


def test_what_a_configuration_leaves_out_is_as_in_transformers(tmp_path: Path) -> None:
    theirs = Gemma4TextConfig()
    assert {name: theirs.to_dict()[name] for name in gemma4.DEFAULTS} == gemma4.DEFAULTS
    assert theirs.rope_parameters == gemma4.ROPES
    raw: dict[str, Any] = {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text"}
    for num_layers in (30, 8):  # the last one sees all in any case
        spec = read(tmp_path, raw | {"num_hidden_layers": num_layers})
        kinds = Gemma4TextConfig(num_hidden_layers=num_layers).layer_types
        windows = [512 if kind == SLIDING else None for kind in kinds]
        assert [each.window for each in spec.attentions] == windows
    assert kv_heads(spec) == {512: (4, 256), None: (4, 512)}


def test_a_table_of_layer_inputs_that_ranks_do_not_divide_is_refused_by_name(
    tmp_path: Path,
) -> None:
    spec = read(tmp_path, "gemma-4-e4b", vocab_size_per_layer_input=262_145)
    with pytest.raises(UnsupportedModel, match="vocab_size_per_layer_input: 262145 does not"):
        Sharding(spec, 0, 2)
