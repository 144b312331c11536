"""Small transformers models with random weights, as folders."""

from pathlib import Path
from typing import Any

import torch
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
    model.save_pretrained(folder, **save_options)
    return model
