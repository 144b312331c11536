"""The family of an architecture. A family is read when a model asks for it."""

from importlib import import_module

from worker_svc.models.families.family import Family
from worker_svc.models.spec import UnsupportedModel

BUILT_IN = {  # the file of each architecture in `families`
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def family_of(architectures: object) -> Family:
    """The family that `architectures` of a config.json names. Raises UnsupportedModel."""
    names = architectures or []
    family = None
    if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str):
        family = find(names[0])
    if family is None:
        raise UnsupportedModel(
            f"architectures: {names!r} is not supported; supported are {', '.join(BUILT_IN)}"
        )
    return family


def find(architecture: str) -> Family | None:
    """The family of an architecture; None: there is none."""
    if architecture not in BUILT_IN:
        return None
    module = import_module(f"worker_svc.models.families.{BUILT_IN[architecture]}")
    family: Family = module.FAMILY
    return family
