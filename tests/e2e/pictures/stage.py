"""A tiny model of text and pictures as a folder, pictures as files, and transformers' answers."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.worker_svc.transformers_models.pictured import (
    BEGIN,
    END,
    IMAGE,
    VOCAB_SIZE,
    PictureOracle,
    write,
)

WORDS = {IMAGE: "<image>", BEGIN: "<begin>", END: "<end>"}
# Turns one after the other; text and pictures as they come.
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
_COLOURS = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.2]}
QWEN = {
    **_COLOURS,
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 64, "longest_edge": 1024},
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
GEMMA = {
    **_COLOURS,
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": 16, "width": 16},
    "resample": 2,
    "rescale_factor": 1 / 255,
}


def preprocessor_of(name: str) -> dict[str, Any]:
    """The content of a family's preprocessor_config.json."""
    return GEMMA if name == "gemma3_vl" else QWEN


def save_pictured_model(name: str, folder: Path) -> Path:
    """A family's checkpoint with a tokenizer of words, a template and a preprocessor."""
    write(name, folder)
    words = {WORDS.get(n, f"w{n}"): n for n in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.add_special_tokens(list(WORDS.values()))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor_of(name)))
    return folder


def drawing(seed: int, width: int, height: int) -> Image.Image:
    """A picture of coloured squares and noise."""
    random = np.random.default_rng(seed)
    squares = random.integers(0, 200, (-(-height // 4), -(-width // 4), 3))
    pixels = squares.repeat(4, axis=0).repeat(4, axis=1)[:height, :width]
    noise = random.integers(0, 56, pixels.shape)
    return Image.fromarray((pixels + noise).astype(np.uint8))


def file_of(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The content of a picture's file."""
    made = io.BytesIO()
    picture.save(made, kind, **options)
    return made.getvalue()


def data_url(content: bytes, media_type: str = "image/png") -> str:
    """A file as a data: URL."""
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def processed(name: str, picture: Image.Image) -> dict[str, Any]:
    """The pixels, and their grid, that transformers' own class makes of a picture."""
    made = Gemma3ImageProcessorPil if name == "gemma3_vl" else Qwen2VLImageProcessorPil
    found: dict[str, Any] = dict(made(**preprocessor_of(name))(picture, return_tensors="pt"))
    return found


Part = int | Image.Image


class Expected:
    """The tokens that transformers gives for parts of a prompt: words and pictures."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._oracle = PictureOracle(name, folder)

    def prompt(self, parts: list[Part]) -> list[int]:
        """The ids of a prompt."""
        ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
                continue
            grid = processed(self._name, part).get("image_grid_thw")
            num_tokens = 4 if grid is None else int(grid.prod()) // 4
            ids += [BEGIN, *[IMAGE] * num_tokens, END]
        return ids

    def greedy(self, parts: list[Part], num_tokens: int) -> list[int]:
        """The tokens after a prompt."""
        made = [processed(self._name, part) for part in parts if not isinstance(part, int)]
        pixels: list[torch.Tensor] = [one["pixel_values"] for one in made]
        grids = [
            grid for one in made for grid in one.get("image_grid_thw", torch.empty(0)).tolist()
        ]
        return self._oracle.greedy(self.prompt(parts), pixels, num_tokens, grids)
