"""Small transformers models with random weights, as folders."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig, PreTrainedModel

Family = tuple[type[PreTrainedConfig], type[PreTrainedModel]]


def save_random_model(
    folder: Path, family: Family, config: dict[str, Any], **save_options: Any
) -> PreTrainedModel:
    """Saves a model of this family and configuration, seeded; norms and biases are random, too."""
    torch.manual_seed(0)
    config_class, model_class = family
    model = model_class(config_class(**config)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.2)
            elif name.endswith(("router.scale", "per_expert_scale")):
                parameter.uniform_(0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.2)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    model.save_pretrained(folder, **save_options)
    return model


def save_disturbed(folder: Path, into: Path, noise: float) -> Path:
    """The model of a folder with noise in its layers: it says the same now and then."""
    into.mkdir()
    generator = torch.Generator().manual_seed(1)
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (into / file.name).write_bytes(file.read_bytes())
            continue
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if ".layers." in name and tensor.dim() == 2:
                tensors[name] = tensor + noise * torch.randn(tensor.shape, generator=generator)
        save_file(tensors, into / file.name, {"format": "pt"})
    return into
