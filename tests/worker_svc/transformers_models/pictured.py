"""Tiny models of text and pictures whose tokens are known, and prompts with pictures for them."""

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForImageTextToText

from pagewire.v1 import types_pb2

VOCAB_SIZE, IMAGE, BEGIN, END = 160, 150, 151, 152
SHORT = [5, 17, 99, 3, 42, 7, 88]
NUM_TOKENS = 12
_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_QWEN_EYES = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 64,
}
_QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": 149,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
}
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
_LINEAR, _FULL, _SLIDING = "linear_attention", "full_attention", "sliding_attention"
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": [_LINEAR, _LINEAR, _LINEAR, _FULL],
    "rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
}


@dataclass(frozen=True, slots=True)
class Golden:
    """A family, and the tokens after SHORT, a picture and SHORT backwards."""

    kind: str
    text: dict[str, Any]
    eyes: dict[str, Any]
    ids: dict[str, int]
    salt: str  # of the draw of its weights
    pixels: tuple[int, ...]  # the shape of a picture's pixel values
    tokens: list[int]


GOLDEN = {
    "qwen3_vl": Golden(
        "qwen3_vl",
        {"rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2]}},
        {**_QWEN_EYES, "deepstack_visual_indexes": [0, 1]},
        _QWEN_IDS,
        "2",
        (16, 3 * 2 * 4 * 4),
        [159, 141, 107, 42, 53, 154, 149, 74, 154, 124, 119, 87],
    ),
    "qwen3_5_vl": Golden(
        "qwen3_5",
        _DELTA,
        _QWEN_EYES,
        _QWEN_IDS,
        "",
        (16, 3 * 2 * 4 * 4),
        [57, 7, 26, 97, 36, 44, 130, 141, 95, 135, 69, 30],
    ),
    "gemma3_vl": Golden(
        "gemma3",
        {
            "layer_types": [_SLIDING, _SLIDING, _SLIDING, _FULL],
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
        },
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
        },
        {
            "image_token_index": IMAGE,
            "boi_token_index": BEGIN,
            "eoi_token_index": END,
            "mm_tokens_per_image": 4,
        },
        "5",
        (1, 3, 16, 16),
        [50, 85, 39, 35, 157, 102, 43, 104, 84, 137, 2, 87],
    ),
}


def drawn(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Standard normal numbers that follow from a name."""
    generator = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    return torch.from_numpy(generator.standard_normal(shape).astype(np.float32))


@torch.no_grad()
def write(name: str, folder: Path) -> Path:
    """Writes a family's checkpoint in float32: norms near their neutral value, others lively."""
    golden = GOLDEN[name]
    config = AutoConfig.for_model(
        golden.kind,
        text_config=_TEXT | golden.text,
        vision_config=golden.eyes,
        tie_word_embeddings=False,
        **golden.ids,
    )
    model = AutoModelForImageTextToText.from_config(config)
    for parameter_name, parameter in model.named_parameters():
        noise = drawn(golden.salt + parameter_name, tuple(parameter.shape))
        parameter.copy_(_value(parameter_name, parameter, noise))
    model.float().save_pretrained(folder)
    return folder


def _value(name: str, parameter: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    if "norm" in name and parameter.ndim == 1 and name.endswith(".weight"):
        return (0.0 if bool((parameter == 0).all()) else 1.0) + 0.2 * noise
    if name.endswith("A_log"):
        return (1 + noise.abs()).log()
    if "embed" in name and parameter.ndim == 2 and "vision" not in name and "visual" not in name:
        return noise
    if parameter.ndim < 2:
        return 0.3 * noise
    num_inputs = parameter[0].numel() if "conv" in name else parameter.shape[-1]
    return noise * 1.5 * num_inputs**-0.5


class PictureOracle:
    """Tokens of a checkpoint by transformers itself, by whole passes."""

    def __init__(self, name: str, folder: Path) -> None:
        self.golden = GOLDEN[name]
        self.model = AutoModelForImageTextToText.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()

    @torch.inference_mode()
    def greedy(
        self,
        prompt: list[int],
        pixels: list[torch.Tensor],
        num_tokens: int = NUM_TOKENS,
        grids: list[list[int]] | None = None,
    ) -> list[int]:
        """The tokens after a prompt whose pictures have these pixel values; squares, if no grids.

        A grid is patches in time, height and width.
        """
        ids = torch.tensor([prompt])
        kinds = (ids == IMAGE).int()
        given: dict[str, Any] = {}
        if pixels:
            given["pixel_values"] = torch.cat(pixels)
        if self.golden.kind == "gemma3":
            given["token_type_ids"] = kinds
        else:
            given["mm_token_type_ids"] = kinds
            if pixels:
                side = int(len(pixels[0]) ** 0.5)
                given["image_grid_thw"] = torch.tensor(grids or [[1, side, side]] * len(pixels))
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **given,
        )
        found: list[int] = output[0, len(prompt) :].tolist()
        return found


def bytes_of(golden: Golden, seed: int) -> NDArray[np.uint8]:
    """A picture's pixels as bytes, in the shape that the encoder takes; of two colours or more.

    Noise alone looks like any other noise to a tiny encoder.
    """
    random = np.random.default_rng(seed)
    rows = 1 if golden.kind == "gemma3" else golden.pixels[0]
    levels = random.integers(0, 200, (rows, 3, 1))
    noise = random.integers(0, 56, (rows, 3, int(np.prod(golden.pixels)) // rows // 3))
    return (levels + noise).astype(np.uint8).reshape(golden.pixels)


def values_of(pixels: NDArray[np.uint8]) -> torch.Tensor:
    """The values that the encoder is given for bytes: from -1 to 1."""
    return (torch.from_numpy(pixels).float() - 127.5) / 127.5


def picture(golden: Golden, position: int, pixels: NDArray[np.uint8]) -> types_pb2.Picture:
    """A picture of four tokens at a position of a prompt."""
    is_whole = golden.kind == "gemma3"
    content_id = zlib.crc32(pixels.tobytes()).to_bytes(16, "little")
    return types_pb2.Picture(
        position=position,
        num_tokens=4,
        content_id=content_id,
        pixels=types_pb2.PicturePixels(
            values=pixels.tobytes(),
            num_rows=1 if is_whole else 16,
            grid=() if is_whole else (1, 4, 4),
            means=[127.5] * 3,
            deviations=[127.5] * 3,
        ),
    )
