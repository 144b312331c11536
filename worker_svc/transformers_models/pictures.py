"""Encoders of pictures of transformers' classes, and how the layers take what they made.

A family is served if it is named here: what a class makes of a picture, and how its layers place
it, is its own. Another one reads text alone.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from worker_svc.attention.pictures import EncodedPicture, Grid, StepPictures
from worker_svc.protocol.pictures import NUM_COLOURS, PictureOrder, Pixels

_ATTENTION = "sdpa"  # of encoders, which have no cache


class PictureForm(Protocol):
    """The form in which a family's encoder takes a picture."""

    sees_both_ways: bool
    num_levels: int  # added to hidden states after the first layers

    def problem_with(self, pixels: Pixels) -> str:
        """Why the encoder cannot take these pixels; empty if it can."""

    def num_tokens(self, pixels: Pixels) -> int:
        """The number of placeholders of a picture without problems."""

    def encode(
        self, base: Any, values: Tensor, pixels: Pixels, content_id: bytes
    ) -> EncodedPicture:
        """Encodes values [rows, 3, n] by the encoder that `base` holds."""


class PatchForm:
    """Qwen's form: patches of a picture of any size, some of which become a token."""

    sees_both_ways = False

    def __init__(self, vision: PretrainedConfig) -> None:
        self.num_levels = len(getattr(vision, "deepstack_visual_indexes", None) or ())
        self._merged = int(vision.spatial_merge_size)
        self._patch = int(vision.temporal_patch_size) * int(vision.patch_size) ** 2

    def problem_with(self, pixels: Pixels) -> str:
        """See `PictureForm`."""
        if pixels.grid is None:
            return "the picture has no grid of patches"
        time, height, width = pixels.grid
        if time != 1 or not height or not width or height % self._merged or width % self._merged:
            return f"a grid of {time} x {height} x {width} patches is none of a picture"
        num_rows, _, size = pixels.rows.shape
        if num_rows != height * width or size != self._patch:
            wanted = f"{height} x {width} of {self._patch}"
            return f"{num_rows} patches of {size} values are not {wanted}"
        return ""

    def num_tokens(self, pixels: Pixels) -> int:
        """See `PictureForm`."""
        time, height, width = self._tokens(pixels)
        return time * height * width

    def _tokens(self, pixels: Pixels) -> Grid:
        assert pixels.grid is not None  # else it had a problem
        time, height, width = pixels.grid
        return time, height // self._merged, width // self._merged

    def encode(
        self, base: Any, values: Tensor, pixels: Pixels, content_id: bytes
    ) -> EncodedPicture:
        """See `PictureForm`."""
        grid = torch.tensor([pixels.grid], device=values.device)
        made = base.get_image_features(values.flatten(1), image_grid_thw=grid, return_dict=True)
        levels = getattr(made, "deepstack_features", None) or ()
        return EncodedPicture(
            content_id,
            made.pooler_output[0],
            tuple(level[0] for level in levels),
            self._tokens(pixels),
        )


class WholeForm:
    """Gemma 3's form: a square picture as a whole, always as many tokens, which see each other."""

    sees_both_ways = True
    num_levels = 0

    def __init__(self, config: PretrainedConfig) -> None:
        self._side = int(config.vision_config.image_size)
        self._num_tokens = int(config.mm_tokens_per_image)

    def problem_with(self, pixels: Pixels) -> str:
        """See `PictureForm`."""
        num_rows, _, size = pixels.rows.shape
        if pixels.grid is not None or num_rows != 1 or size != self._side**2:
            return f"the picture is not {self._side} x {self._side} pixels as a whole"
        return ""

    def num_tokens(self, pixels: Pixels) -> int:
        """See `PictureForm`."""
        return self._num_tokens

    def encode(
        self, base: Any, values: Tensor, pixels: Pixels, content_id: bytes
    ) -> EncodedPicture:
        """See `PictureForm`."""
        picture = values.view(1, NUM_COLOURS, self._side, self._side)
        made = base.get_image_features(picture, return_dict=True)
        return EncodedPicture(content_id, made.pooler_output[0], (), None)


def form_of(config: PretrainedConfig) -> PictureForm | None:
    """The form of a configuration's family; None: its pictures are not served."""
    match config.model_type:
        case "qwen3_vl" | "qwen3_vl_moe" | "qwen3_5" | "qwen3_5_moe":
            return PatchForm(config.vision_config)
        case "gemma3":
            return WholeForm(config)
    return None


@dataclass(frozen=True, slots=True)
class PictureTower:
    """The encoder of one model in memory."""

    base: nn.Module  # the part that holds it
    form: PictureForm
    device: torch.device
    dtype: torch.dtype
    token_bytes: int  # of what it makes of a token

    @classmethod
    def of(
        cls, base: nn.Module, config: PretrainedConfig, device: torch.device, dtype: torch.dtype
    ) -> "PictureTower | None":
        """The encoder in a part of a model; None: there is none that is served."""
        form = form_of(config)
        if form is None:
            return None
        for module in base.modules():
            own = getattr(module, "config", None)
            if own is not None and own.model_type == config.vision_config.model_type:
                own._attn_implementation = _ATTENTION
        width = int(config.get_text_config(decoder=True).hidden_size) * (1 + form.num_levels)
        return cls(base, form, device, dtype, width * dtype.itemsize)

    @property
    def sees_both_ways(self) -> bool:
        """True if all tokens of a picture see each other."""
        return self.form.sees_both_ways

    def problem_with(self, order: PictureOrder) -> str:
        """Why a picture cannot be encoded; empty if it can."""
        assert order.pixels is not None  # else it was refused
        if problem := self.form.problem_with(order.pixels):
            return problem
        num_tokens = self.form.num_tokens(order.pixels)
        if order.num_tokens != num_tokens:
            return f"{order.num_tokens} placeholders stand for a picture of {num_tokens} tokens"
        return ""

    @torch.inference_mode()
    def encode(self, order: PictureOrder) -> EncodedPicture:
        """Encodes a picture without problems."""
        pixels = order.pixels
        assert pixels is not None
        means, deviations = (
            torch.tensor(colours, device=self.device).view(NUM_COLOURS, 1)
            for colours in (pixels.means, pixels.deviations)
        )
        values = torch.from_numpy(pixels.rows.copy()).to(self.device).float()
        values = ((values - means) / deviations).to(self.dtype)
        return self.form.encode(self.base, values, pixels, order.content_id)


def inputs_with(
    layers: nn.Module, token_ids: Tensor, positions: Tensor, pictures: StepPictures | None
) -> dict[str, Any]:
    """The keywords of layers for token ids and positions [B, N], and their pictures."""
    if pictures is None:
        return {"input_ids": token_ids, "position_ids": positions}
    embed: Any = layers.get_input_embeddings  # of all classes
    embedded = pictures.placed(embed()(token_ids).flatten(0, 1))
    inputs: dict[str, Any] = {
        "inputs_embeds": embedded.view(*token_ids.shape, -1),
        "position_ids": positions,
    }
    if pictures.rotations is not None:
        inputs["position_ids"] = pictures.rotations.view(3, *token_ids.shape)
    if (levels := pictures.levels_of_tokens()) is not None:
        is_placeholder, added = levels
        inputs["visual_pos_masks"] = is_placeholder.view(token_ids.shape)
        inputs["deepstack_visual_embeds"] = added
    return inputs
