"""The family of an architecture: one of `families`, or that of a plug-in.

A plug-in is an installed package with an entry point of the group `pagewire.families`, which is
named as the architecture and leads to a `Family`. Families are imported when a model asks for them.
"""

from importlib import import_module

from wire import plug_ins
from worker_svc.models.families.family import Family
from worker_svc.models.spec import UnsupportedModel

BUILT_IN = {  # the file of each architecture in `families`
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Dots1ForCausalLM": "dots1",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma4ForCausalLM": "gemma4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "GraniteMoeHybridForCausalLM": "granite_hybrid",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2_moe",
    "LlamaForCausalLM": "llama",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "NemotronHForCausalLM": "nemotron_h",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "SmolLM3ForCausalLM": "smollm3",
}
WRAPPERS = {  # the file of the decoder that each holds
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
}
PLUG_INS = "pagewire.families"


def family_of(architectures: object) -> Family:
    """The family that `architectures` of a config.json names. Raises UnsupportedModel."""
    names = architectures or []
    family = None
    if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str):
        family = find(names[0])
    if family is None:
        known = ", ".join((*BUILT_IN, *plug_ins.names(PLUG_INS)))
        raise UnsupportedModel(f"architectures: {names!r} is not supported; supported are {known}")
    return family


def find(architecture: str) -> Family | None:
    """The family of an architecture; None: there is none.

    Raises UnsupportedModel for a plug-in that cannot be used.
    """
    file = BUILT_IN.get(architecture) or WRAPPERS.get(architecture)
    if file is None:
        return _plugged_in(architecture)
    module = import_module(f"worker_svc.models.families.{file}")
    family: Family = module.FAMILY
    return family


def _plugged_in(architecture: str) -> Family | None:
    try:
        found = plug_ins.find(PLUG_INS, architecture)
    except plug_ins.BadPlugIn as error:
        raise UnsupportedModel(f"architectures: {error}") from error
    if found is None:
        return None
    if not isinstance(found.value, Family) or architecture not in found.value.architectures:
        raise UnsupportedModel(
            f"architectures: the plug-in {found.place} holds no family of {architecture}"
        )
    return found.value
