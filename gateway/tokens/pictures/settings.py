"""The form in which a model wants pictures: from the files of its folder, or why there is none.

Of each file only what is known to matter is read, and a value that asks for something else means
that the model's pictures are not served.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from pagewire.gguf.files import read_file

CONFIG, PREPROCESSOR, PROCESSOR = "config.json", "preprocessor_config.json", "processor_config.json"
# Pixels that an encoder is given at most, of whatever size a picture is: more than a message has
# room for would be more.
MAX_ENCODED_PIXELS = 1 << 22
_FILTERS = range(6)  # of Pillow's Resampling
_PATCH_MODELS = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_WHOLE_MODELS = ("gemma3",)
Colours = tuple[float, float, float]


class UnservedPictures(ValueError):
    """Raised for a model whose pictures are not served; says why."""


class EncoderForm(Enum):
    """The form in which an encoder takes pictures."""

    PATCHES = "patches"  # of a picture of any size
    WHOLE = "whole"  # of one size


@dataclass(frozen=True, slots=True)
class PictureSettings:
    """The steps from a picture to the encoder's pixels, and the tokens that stand for it."""

    form: EncoderForm
    token_id: int  # stands for a picture, as often as it has tokens
    begin_id: int
    end_id: int
    resample: int  # of Pillow's Resampling
    means: Colours  # of bytes, as are deviations
    deviations: Colours
    gap: str = ""  # text before the begin and after the end
    height: int = 0  # of a whole picture
    width: int = 0
    num_tokens: int = 0
    patch_size: int = 0  # pixels of a side
    temporal_patch_size: int = 0
    merge_size: int = 0  # patches of a side that become a token
    min_pixels: int = 0
    max_pixels: int = 0


def read_settings(folder: Path) -> PictureSettings | None:
    """The settings of a model's folder or file; None: its prompts have no pictures.

    Raises UnservedPictures.
    """
    config = _read(folder, CONFIG)
    if not config.get("vision_config"):
        return None
    kind = config.get("model_type")
    if kind not in (*_PATCH_MODELS, *_WHOLE_MODELS):
        raise UnservedPictures(f"model_type {kind!r} is none whose pictures are served")
    given = _read(folder, PREPROCESSOR) or _read(folder, PROCESSOR).get("image_processor") or {}
    if not given:
        raise UnservedPictures(f"{PREPROCESSOR} is missing")
    try:
        common = _common(given)
        return (_patches if kind in _PATCH_MODELS else _whole)(config, given, common)
    except (KeyError, TypeError, ValueError) as error:
        raise UnservedPictures(f"{PREPROCESSOR}: {error!r}") from error


def _read(folder: Path, name: str) -> dict[str, Any]:
    content = read_file(folder, name)
    found = {} if content is None else json.loads(content)
    return found if isinstance(found, dict) else {}


def _common(given: Mapping[str, Any]) -> dict[str, Any]:
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if given.get(name) is False:
            raise ValueError(f"{name} is false")
    if given.get("do_pan_and_scan"):
        raise ValueError("do_pan_and_scan is true")
    if given.get("do_center_crop"):
        raise ValueError("do_center_crop is true")
    if (resample := int(given.get("resample", 3))) not in _FILTERS:
        raise ValueError(f"resample is {resample}")
    scale = float(given.get("rescale_factor", 1 / 255))
    return {
        "resample": resample,
        "means": _colours(given["image_mean"], scale),
        "deviations": _colours(given["image_std"], scale),
    }


def _colours(given: Any, scale: float) -> Colours:
    red, green, blue = (float(value) / scale for value in given)
    return red, green, blue


def _patches(
    config: Mapping[str, Any], given: Mapping[str, Any], common: dict[str, Any]
) -> PictureSettings:
    size = given.get("size") or {}
    least = int(given.get("min_pixels") or size["shortest_edge"])
    most = int(given.get("max_pixels") or size["longest_edge"])
    vision = config["vision_config"]
    for name, own in (("patch_size", "patch_size"), ("merge_size", "spatial_merge_size")):
        if int(given[name]) != int(vision[own]):
            raise ValueError(f"{name} is {given[name]}, and the encoder's is {vision[own]}")
    return PictureSettings(
        form=EncoderForm.PATCHES,
        token_id=int(config["image_token_id"]),
        begin_id=int(config["vision_start_token_id"]),
        end_id=int(config["vision_end_token_id"]),
        patch_size=int(given["patch_size"]),
        temporal_patch_size=int(given.get("temporal_patch_size", 2)),
        merge_size=int(given["merge_size"]),
        min_pixels=min(least, MAX_ENCODED_PIXELS),
        max_pixels=min(most, MAX_ENCODED_PIXELS),
        **common,
    )


def _whole(
    config: Mapping[str, Any], given: Mapping[str, Any], common: dict[str, Any]
) -> PictureSettings:
    def token(name: str) -> int:
        return int(config.get(f"{name}_token_index") or config[f"{name}_token_id"])

    return PictureSettings(
        form=EncoderForm.WHOLE,
        token_id=token("image"),
        begin_id=token("boi"),
        end_id=token("eoi"),
        gap="\n\n",
        height=int(given["size"]["height"]),
        width=int(given["size"]["width"]),
        num_tokens=int(config["mm_tokens_per_image"]),
        **common,
    )
