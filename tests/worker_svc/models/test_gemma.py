"""Gemma 2 and 3 by layers of ours against transformers, and what their configurations say."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
)

from tests.gguf_files import GgufFile, packed
from tests.pagewire.gguf.test_gemma import file_of, random_model
from tests.worker_svc.models.configs import read, windows
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
    SLIDING,
    WINDOW,
    Pair,
    cuts,
    greedy,
    in_chunks,
    in_each_way,
    load,
    made_once,
)
from tests.worker_svc.random_models import Family
from tests.worker_svc.transformers_models.families import write
from worker_svc.models import load_model
from worker_svc.models.embedding import IntegerEmbedding
from worker_svc.models.families import gemma, gemma2, gemma3
from worker_svc.models.rope import LinearScaling, RotaryConfig
from worker_svc.models.spec import UnsupportedModel

GEMMA2: Family = (Gemma2Config, Gemma2ForCausalLM)
GEMMA3: Family = (Gemma3TextConfig, Gemma3ForCausalLM)
SIZES = NO_IDS | {
    "hidden_size": 64,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 24,
}
CHECKPOINTS: dict[str, tuple[Family, dict[str, Any]]] = {
    "gemma3": (
        GEMMA3,
        {
            "num_hidden_layers": 4,
            "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma3-untied-biases": (
        GEMMA3,
        {"num_hidden_layers": 2, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "gemma2": (
        GEMMA2,
        {
            "num_hidden_layers": 3,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 4.0,
        },
    ),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    return made_once(tmp_path_factory, CHECKPOINTS, SHAPE | SIZES)


@pytest.mark.usefixtures("few_programs")
@in_each_way(CHECKPOINTS, ("gemma2", "gemma3"))
def test_logits_of_prompts_chunks_and_single_tokens(
    checkpoint: Callable[[str], Pair], name: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, theirs = checkpoint(name)
    ours = load(folder, by, monkeypatch)
    length = 2 * WINDOW + 9
    chunks = [[cut, cut, length - 2 * cut - 3, 1, 1, 1] for cut in cuts(by)]
    prompts = make_prompts(*([length] * len(chunks)))
    for prompt, logits in zip(prompts, in_chunks(ours, prompts, chunks), strict=True):
        assert_same(logits, expected_logits(theirs, prompt))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_greedy_tokens_are_those_of_transformers(
    checkpoint: Callable[[str], Pair], name: str
) -> None:
    folder, theirs = checkpoint(name)
    ours = load_model(folder, torch.float32, torch.device("cpu"), MAX_MODEL_LEN)
    (prompt,) = make_prompts(WINDOW - 1)
    expected = greedy(theirs, prompt, 2 * WINDOW)
    steps = Steps(ours, [torch.cat((prompt, torch.tensor(expected)))])
    found = [int(steps.run({0: len(prompt)})[0][-1].argmax())]
    for _ in expected[1:]:
        found.append(int(steps.run({0: 1})[0][-1].argmax()))
    assert found == expected


@pytest.mark.parametrize("by", ["torch", "c"])
def test_weights_of_norms_keep_what_16_bits_would_round(
    checkpoint: Callable[[str], Pair], by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 + w for a w of 2^-10 is no number of bfloat16."""
    folder, _ = checkpoint("gemma3")
    theirs = Gemma3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        theirs.model.norm.weight.fill_(2**-10)
        theirs.model.layers[0].self_attn.q_norm.weight.fill_(2**-10)
    theirs.save_pretrained(tmp_path)
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "1" if by == "c" else "0")
    ours: Any = load_model(tmp_path, torch.bfloat16, torch.device("cpu"), MAX_MODEL_LEN)
    if by == "c":
        layer = ours._compiled._layers[0]
        weights = ours._compiled._final_norm, layer.qk_norm[0]
    else:
        weights = ours._final_norm.weight, ours._layers[0].attention.qk_norms[0]
    for weight in weights:
        assert weight.dtype == torch.float32
        assert (weight == 1 + 2**-10).all()
    (prompt,) = make_prompts(40)
    found = Steps(ours, [prompt]).run({0: 40})[0]
    expected = expected_logits(theirs, prompt).float()
    error = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < 0.05


@pytest.mark.parametrize("layout", ["published", "newer"])
def test_the_text_of_a_model_with_pictures(
    tmp_path: Path, layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    write("gemma3_vl", tmp_path)
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    if layout == "newer":
        file = tmp_path / "model.safetensors"
        tensors = {_newer(name): tensor for name, tensor in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
    ours = load_model(tmp_path, torch.float32, torch.device("cpu"), MAX_MODEL_LEN)
    assert ours.spec.architecture == "Gemma3ForConditionalGeneration"
    assert "other parts of the model are not read: " in caplog.text
    (prompt,) = make_prompts(40)
    steps = Steps(ours, [prompt])
    found = torch.cat([steps.run({0: count})[0] for count in (30, 1, 9)])
    with torch.inference_mode():
        assert_same(found, theirs(input_ids=prompt.unsqueeze(0)).logits[0])


def _newer(name: str) -> str:
    """A tensor's name as transformers saved it for a while."""
    if name == "language_model.lm_head.weight":
        return "lm_head.weight"
    if name.startswith("language_model.model."):
        return f"model.language_model.{name.removeprefix('language_model.model.')}"
    return f"model.{name}"


def test_what_a_published_configuration_with_pictures_leaves_out(tmp_path: Path) -> None:
    """The one of gemma-3-4b-it has no more of the text than this."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": text,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152},
    }
    spec = read(tmp_path, raw)
    mixer = spec.uniform.mixer
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim) == (8, 4, 256)
    assert (spec.vocab_size, spec.max_model_len, spec.checkpoint_dtype) == (
        262_208,
        131_072,
        "bfloat16",
    )
    assert spec.ropes[gemma.WHOLE] == RotaryConfig(1e6, LinearScaling(8.0))
    assert windows(spec)[:6] == [1024] * 5 + [None]
    with pytest.raises(UnsupportedModel, match="logit_bend: this key"):
        read(tmp_path, raw, logit_bend=0.5)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
@pytest.mark.parametrize("integers", [False, True])
def test_a_gguf_file(name: str, integers: bool, tmp_path: Path) -> None:
    """Its table may be of integers, too, whose rows are scaled when they are read."""
    theirs = random_model(name)
    table = theirs.model.embed_tokens.weight
    if integers:  # in groups of 32 with a scale of 2^-7 each: the file has them as they are
        with torch.no_grad():
            table.copy_((table * 100).round().clamp(-126, 126))
            table[:, ::32] = 127
            table /= 128

    def edit(file: GgufFile) -> None:
        if integers:
            file.tensors["token_embd.weight"] = packed(table.detach().numpy(), "Q8_0")

    path = file_of(theirs, edit, name).write(tmp_path / "model.gguf")
    ours = load_model(path, torch.float32, torch.device("cpu"), 32)
    assert isinstance(ours._embedding, IntegerEmbedding) == integers
    (prompt,) = make_prompts(30)
    prompt %= theirs.config.vocab_size
    steps = Steps(ours, [prompt])
    found = torch.cat([steps.run({0: count})[0] for count in (20, 1, 9)])
    assert_same(found, expected_logits(theirs, prompt))


def test_a_published_configuration_of_gemma_3(tmp_path: Path) -> None:
    spec = read(tmp_path, "gemma-3-1b")
    assert windows(spec) == ([512] * 5 + [None]) * 4 + [512] * 2
    assert spec.ropes == {
        gemma.WHOLE: RotaryConfig(1e6),
        gemma.NEAR: RotaryConfig(1e4),
    }
    assert {layer.mixer.rope for layer in spec.layers if layer.mixer.window} == {gemma.NEAR}
    assert spec.eos_token_ids == (1, 106)
    assert spec.tie_word_embeddings
    mixer = spec.uniform.mixer
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim) == (4, 1, 256)
    assert {layer.mixer.scale for layer in spec.layers} == {256**-0.5}


def test_what_stretches_long_contexts_is_not_for_windows(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    spec = read(tmp_path, "gemma-3-1b", rope_scaling=linear)
    assert spec.ropes[gemma.WHOLE] == RotaryConfig(1e6, LinearScaling(8.0))
    assert spec.ropes[gemma.NEAR] == RotaryConfig(1e4)
    newer = {FULL: linear | {"rope_theta": 1e6}, SLIDING: {"rope_type": "default"}}
    gone = dict.fromkeys(("rope_theta", "rope_local_base_freq", "rope_scaling"), ...)
    assert read(tmp_path, "gemma-3-1b", rope_parameters=newer, **gone).ropes == spec.ropes


@pytest.mark.parametrize(
    ("defaults", "config_class"),
    [(gemma2.DEFAULTS, Gemma2Config), (gemma3.DEFAULTS, Gemma3TextConfig)],
)
def test_what_a_configuration_leaves_out_is_as_in_transformers(
    tmp_path: Path, defaults: dict[str, Any], config_class: Any
) -> None:
    theirs = config_class()
    assert defaults == {name: getattr(theirs, name) for name in defaults}
    raw = {
        "architectures": ["Gemma2ForCausalLM" if config_class is Gemma2Config else ...],
        "model_type": theirs.model_type,
    }
    if config_class is Gemma3TextConfig:
        raw["architectures"] = ["Gemma3ForCausalLM"]
    spec = read(tmp_path, raw)
    assert windows(spec) == [
        theirs.sliding_window if kind == SLIDING else None for kind in theirs.layer_types
    ]
    assert spec.logit_softcap == theirs.final_logit_softcapping


@pytest.mark.parametrize("value", ["50", True, -1.0, 0])
def test_a_softcap_that_is_no_number_above_0_is_refused(tmp_path: Path, value: object) -> None:
    raw = {"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": value}
    with pytest.raises(UnsupportedModel, match="attn_logit_softcapping"):
        read(tmp_path, raw)
