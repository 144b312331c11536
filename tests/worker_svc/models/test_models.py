"""Each model family against transformers in float32: whole prompts, chunks, mixed batches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Dots1Config,
    Dots1ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from tests.worker_svc.random_models import Family, save_random_model
from worker_svc.attention.batch import AttentionBatch, StateCut
from worker_svc.models import Decoder, load_model
from worker_svc.models.spec import UnsupportedModel

BLOCK_SIZE = 16
NUM_SNAPSHOTS = 2
MAX_MODEL_LEN = 96
PROMPT_LEN = 40
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]
SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_SCALING = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG_ROPE = {  # of 6 pairs
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
    "original_max_position_embeddings": 32,
}
DYNAMIC_SCALING = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
LINEAR_SCALING = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}

NO_IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))

LLAMA: Family = (LlamaConfig, LlamaForCausalLM)
MISTRAL: Family = (MistralConfig, MistralForCausalLM)
QWEN2: Family = (Qwen2Config, Qwen2ForCausalLM)
QWEN3: Family = (Qwen3Config, Qwen3ForCausalLM)
DOTS1: Family = (Dots1Config, Dots1ForCausalLM)
DEEPSEEK_V3: Family = (DeepseekV3Config, DeepseekV3ForCausalLM)
GLM4_MOE_LITE: Family = (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM)
GLM4_MOE: Family = (Glm4MoeConfig, Glm4MoeForCausalLM)
MINIMAX_M2: Family = (MiniMaxM2Config, MiniMaxM2ForCausalLM)
GPT_OSS: Family = (GptOssConfig, GptOssForCausalLM)
QWEN2_MOE: Family = (Qwen2MoeConfig, Qwen2MoeForCausalLM)
QWEN3_MOE: Family = (Qwen3MoeConfig, Qwen3MoeForCausalLM)
MIXTRAL: Family = (MixtralConfig, MixtralForCausalLM)
SMOLLM3: Family = (SmolLM3Config, SmolLM3ForCausalLM)
EXPERTS = {"moe_intermediate_size": 40, "num_experts": 6, "num_experts_per_tok": 3}
LATENTS = NO_IDS | {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
}
CHECKPOINTS: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama": (LLAMA, {"num_key_value_heads": 4}),
    "llama-tied": (LLAMA, {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama-biases": (LLAMA, {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": (LLAMA, {"num_key_value_heads": 2, "head_dim": 32}),
    "llama3": (LLAMA, {"num_key_value_heads": 2, "rope_parameters": LLAMA3_SCALING}),
    "llama-linear": (LLAMA, {"num_key_value_heads": 2, "rope_parameters": LINEAR_SCALING}),
    "llama-yarn": (LLAMA, {"num_key_value_heads": 2, "rope_parameters": YARN_SCALING}),
    "llama-longrope": (LLAMA, {"num_key_value_heads": 2, "rope_parameters": LONG_ROPE}),
    "qwen2-longrope-short": (
        QWEN2,
        {
            "num_key_value_heads": 2,
            "rope_parameters": LONG_ROPE | {"original_max_position_embeddings": MAX_MODEL_LEN},
        },
    ),
    "llama-dynamic": (LLAMA, {"num_key_value_heads": 2, "rope_parameters": DYNAMIC_SCALING}),
    "mistral": (MISTRAL, {"num_key_value_heads": 2, "head_dim": None, "sliding_window": None}),
    "mistral-window": (MISTRAL, {"num_key_value_heads": 1, "sliding_window": MAX_MODEL_LEN}),
    "qwen2": (QWEN2, {"num_key_value_heads": 2}),
    "qwen2-tied": (QWEN2, {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen3": (QWEN3, {"num_key_value_heads": 2, "head_dim": 24}),
    "qwen3-biases": (QWEN3, {"num_key_value_heads": 1, "head_dim": 12, "attention_bias": True}),
    "qwen3-moe": (
        QWEN3_MOE,
        EXPERTS | {"num_key_value_heads": 2, "head_dim": 24, "norm_topk_prob": True},
    ),
    "qwen3-moe-mixed": (  # the second layer has experts
        QWEN3_MOE,
        EXPERTS | {"num_key_value_heads": 1, "decoder_sparse_step": 2, "attention_bias": True},
    ),
    "qwen2-moe": (
        QWEN2_MOE,
        EXPERTS
        | {
            "num_key_value_heads": 2,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "shared_expert_intermediate_size": 80,
        },
    ),
    "dots1": (
        DOTS1,
        {
            "num_key_value_heads": 2,
            "num_hidden_layers": 3,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
    ),
    "qwen2-moe-window": (  # of the first layer
        QWEN2_MOE,
        EXPERTS
        | {
            "num_key_value_heads": 1,
            "shared_expert_intermediate_size": 40,
            "use_sliding_window": True,
            "sliding_window": 16,
        },
    ),
    "dots1-window": (  # of the second layer
        DOTS1,
        {
            "num_key_value_heads": 1,
            "moe_intermediate_size": 24,
            "n_routed_experts": 5,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            "max_window_layers": 1,
        },
    ),
    "mixtral": (
        MIXTRAL,
        {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek-v3": (  # YaRN, whose factor on scores counts; groups of experts
        DEEPSEEK_V3,
        LATENTS
        | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
        | {"rope_parameters": YARN_SCALING | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    ),
    "deepseek-v3-biases": (  # no experts, queries of hidden states, pairs half a head apart
        DEEPSEEK_V3,
        LATENTS
        | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 3, "q_lora_rank": None}
        | {"attention_bias": True, "rope_interleave": False},
    ),
    "glm4-moe-lite": (GLM4_MOE_LITE, LATENTS | {"n_shared_experts": 2, "v_head_dim": 30}),
    "glm4-moe": (  # 6 of 12 dimensions turn; groups of experts
        GLM4_MOE,
        NO_IDS
        | {"num_key_value_heads": 2, "head_dim": 12, "num_hidden_layers": 3, "use_qk_norm": True}
        | {"moe_intermediate_size": 24, "n_routed_experts": 12, "num_experts_per_tok": 3}
        | {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "routed_scaling_factor": 2.5},
    ),
    "glm4-moe-biases": (  # no QK norm, no layer with one MLP, a third of a head turns
        GLM4_MOE,
        NO_IDS
        | {"num_key_value_heads": 1, "head_dim": 18, "attention_bias": True}
        | {"moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 3}
        | {"first_k_dense_replace": 0, "norm_topk_prob": False, "partial_rotary_factor": 0.34},
    ),
    "minimax-m2": (
        MINIMAX_M2,
        NO_IDS
        | {"num_key_value_heads": 2, "head_dim": 20, "num_local_experts": 5, "rotary_dim": 12}
        | {"num_experts_per_tok": 3},
    ),
    "gpt-oss": (  # a window and full attention, YaRN without truncation
        GPT_OSS,
        NO_IDS
        | {"num_key_value_heads": 2, "head_dim": 12, "sliding_window": 9}
        | {"num_local_experts": 5, "num_experts_per_tok": 3},
    ),
    "gpt-oss-clamped": (  # by limits that count
        GPT_OSS,
        NO_IDS
        | {"num_key_value_heads": 1, "head_dim": 24, "sliding_window": 17, "swiglu_alpha": 1.2}
        | {"num_local_experts": 3, "num_experts_per_tok": 2, "swiglu_limit": 0.5}
        | {"attention_bias": False, "rope_parameters": YARN_SCALING},
    ),
    "smollm3": (SMOLLM3, NO_IDS | {"num_key_value_heads": 2, "no_rope_layer_interval": 2}),
    "smollm3-listed": (
        SMOLLM3,
        NO_IDS
        | {
            "num_key_value_heads": 1,
            "no_rope_layers": [0, 1],
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
}


def save(folder: Path, name: str, **save_options: Any) -> PreTrainedModel:
    family, changes = CHECKPOINTS[name]
    return save_random_model(folder, family, SHAPE | changes, **save_options)


Loaded = tuple[Decoder, PreTrainedModel]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Loaded]:
    """Our model and that of transformers, cached by checkpoint and device."""
    made: dict[tuple[str, str], Loaded] = {}

    def get(name: str, device: str) -> Loaded:
        if (name, device) not in made:
            folder = tmp_path_factory.mktemp(name)
            theirs = save(folder, name)
            ours = load_model(folder, torch.float32, torch.device(device), MAX_MODEL_LEN)
            made[name, device] = ours, theirs
        return made[name, device]

    return get


class Steps:
    """Runs sequences through a model step by step, in shuffled blocks of a small cache."""

    def __init__(self, model: Decoder, prompts: list[Tensor]) -> None:
        self._model = model
        self._prompts = prompts
        self.computed = [0] * len(prompts)
        width = -(-max(MAX_MODEL_LEN, *map(len, prompts)) // BLOCK_SIZE)
        num_blocks = len(prompts) * width + 1
        self._cache = model.new_cache(num_blocks, BLOCK_SIZE)
        order = torch.randperm(num_blocks - 1) + 1
        self._tables = order.view(len(prompts), width).int()
        model.make_states(len(prompts), NUM_SNAPSHOTS)

    def run(self, scheduled: dict[int, int], cuts: tuple[StateCut, ...] = ()) -> list[Tensor]:
        """Computes these numbers of tokens in one step; logits of all tokens, by sequence.

        A sequence has the slot of its number. `cuts` are those of the step's sequences.
        """
        device = self._model.device
        token_ids, positions, slots, ends = [], [], [], []
        for row, count in scheduled.items():
            at = torch.arange(self.computed[row], self.computed[row] + count)
            self.computed[row] += count
            token_ids.append(self._prompts[row][at])
            positions.append(at)
            slots.append(self._tables[row][at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE)
            ends.append(self.computed[row])
        width = -(-max(ends) // BLOCK_SIZE)
        counts = list(scheduled.values())
        batch = AttentionBatch(
            slot_mapping=torch.cat(slots).to(device),
            block_tables=self._tables[list(scheduled), :width].to(device),
            context_lens=torch.tensor(ends, dtype=torch.int32, device=device),
            cu_seqlens_q=torch.tensor([0, *counts], device=device).cumsum(0).int(),
            max_seqlen_q=max(counts),
            max_context_len=max(ends),
            slots=torch.tensor(list(scheduled), device=device),
            state_cuts=cuts,
        )
        hidden = self._model.forward(
            torch.cat(token_ids).to(device), torch.cat(positions).to(device), self._cache, batch
        )
        if self._model.states is not None:
            self._model.states.commit(np.array(list(scheduled)))
        return list(self._model.logits(hidden).cpu().split(counts))


def make_prompts(*lengths: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randint(0, SHAPE["vocab_size"], (length,)) for length in lengths]


@torch.inference_mode()
def expected_logits(theirs: PreTrainedModel, prompt: Tensor) -> Tensor:
    return theirs(prompt.unsqueeze(0)).logits[0]


def assert_same(ours: Tensor, expected: Tensor) -> None:
    assert ours.dtype == torch.float32
    assert (ours - expected).abs().max() < 1e-4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_of_a_whole_prompt_are_those_of_transformers(
    checkpoint: Callable[[str, str], Loaded], name: str, device: str
) -> None:
    ours, theirs = checkpoint(name, device)
    (prompt,) = make_prompts(PROMPT_LEN)
    expected = expected_logits(theirs, prompt)
    assert expected.abs().max() > 0.5  # logits near 0 would prove nothing
    assert_same(Steps(ours, [prompt]).run({0: PROMPT_LEN})[0], expected)


@pytest.mark.parametrize("chunk", [1, 7, 16, 17])
@pytest.mark.parametrize(
    "name", ["deepseek-v3", "llama3", "mistral", "qwen2", "qwen3", "qwen3-moe", "smollm3"]
)
def test_chunked_prefill_gives_the_same_logits(
    checkpoint: Callable[[str, str], Loaded], name: str, chunk: int
) -> None:
    ours, theirs = checkpoint(name, "cpu")
    (prompt,) = make_prompts(PROMPT_LEN)
    steps = Steps(ours, [prompt])
    chunks = [
        steps.run({0: min(chunk, PROMPT_LEN - start)})[0] for start in range(0, PROMPT_LEN, chunk)
    ]
    assert_same(torch.cat(chunks), expected_logits(theirs, prompt))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name",
    [
        "deepseek-v3",
        "deepseek-v3-biases",
        "dots1",
        "glm4-moe",
        "glm4-moe-lite",
        "llama-biases",
        "llama-yarn",
        "minimax-m2",
        "mixtral",
        "qwen2-longrope-short",
        "qwen2-moe",
        "qwen2-tied",
        "qwen3-biases",
        "qwen3-moe-mixed",
    ],
)
def test_a_mixed_batch_gives_every_sequence_its_own_logits(
    checkpoint: Callable[[str, str], Loaded], name: str, device: str
) -> None:
    ours, theirs = checkpoint(name, device)
    prompts = make_prompts(33, 1, 20, 18)
    steps = Steps(ours, prompts)
    logits: list[list[Tensor]] = [[] for _ in prompts]
    # Whole prompts, chunks and decodes together, then decodes alone, in varying order.
    schedule = [
        {0: 30},
        {2: 5, 0: 1, 3: 15},
        {1: 1, 3: 1, 2: 13, 0: 1},
        {0: 1, 3: 1, 2: 1},
        {2: 1, 3: 1},
    ]
    for scheduled in schedule:
        for row, part in zip(scheduled, steps.run(scheduled), strict=True):
            logits[row].append(part)
    for prompt, parts in zip(prompts, logits, strict=True):
        assert_same(torch.cat(parts), expected_logits(theirs, prompt))


def test_a_sharded_checkpoint_is_the_same_model(
    checkpoint: Callable[[str, str], Loaded], tmp_path: Path
) -> None:
    theirs = save(tmp_path, "llama", max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours = load_model(tmp_path, torch.float32, torch.device("cpu"), MAX_MODEL_LEN)
    (prompt,) = make_prompts(PROMPT_LEN)
    assert_same(Steps(ours, [prompt]).run({0: PROMPT_LEN})[0], expected_logits(theirs, prompt))


@pytest.mark.parametrize("name", ["deepseek-v3-biases", "llama-tied", "qwen3", "qwen3-moe"])
def test_bfloat16_stays_close_to_float32(tmp_path: Path, name: str) -> None:
    theirs = save(tmp_path, name)
    ours = load_model(tmp_path, torch.bfloat16, torch.device("cpu"), MAX_MODEL_LEN)
    (prompt,) = make_prompts(PROMPT_LEN)
    logits = Steps(ours, [prompt]).run({0: PROMPT_LEN})[0]
    expected = expected_logits(theirs, prompt)
    error = (logits - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < 0.03


def test_a_window_that_no_layer_has_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    config_class, model_class = LLAMA
    config = config_class(**SHAPE | {"num_key_value_heads": 1, "sliding_window": MAX_MODEL_LEN})
    model_class(config).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match="sliding_window"):
        load_model(tmp_path, torch.float32, torch.device("cpu"), MAX_MODEL_LEN + 1)


def test_a_longrope_model_that_is_served_beyond_its_original_length_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, "llama-longrope")
    for length, is_told in ((32, False), (33, True)):
        caplog.clear()
        load_model(tmp_path, torch.float32, torch.device("cpu"), length)
        assert ("long_factor holds for all contexts" in caplog.text) == is_told


def test_a_dynamic_rope_is_not_served_beyond_the_models_own_length(tmp_path: Path) -> None:
    save(tmp_path, "llama-dynamic")
    with pytest.raises(UnsupportedModel, match=r"max_model_len: 129 is not in 1\.\.128"):
        load_model(tmp_path, torch.float32, torch.device("cpu"), 129)


def test_a_config_that_promises_other_weights_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "llama-tied")
    config = tmp_path / "config.json"
    untied = config.read_text().replace(
        '"tie_word_embeddings": true', '"tie_word_embeddings": false'
    )
    config.write_text(untied)
    with pytest.raises(ValueError, match=r"lm_head\.weight not found"):
        load_model(tmp_path, torch.float32, torch.device("cpu"), MAX_MODEL_LEN)
