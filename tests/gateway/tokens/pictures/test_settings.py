"""The files of a model say how it wants pictures; what they ask for beyond that is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.tokens.pictures.settings import (
    MAX_ENCODED_PIXELS,
    EncoderForm,
    UnservedPictures,
    read_settings,
)

QWEN = {
    "model_type": "qwen3_vl",
    "vision_config": {"patch_size": 16, "spatial_merge_size": 2},
    "image_token_id": 7,
    "vision_start_token_id": 8,
    "vision_end_token_id": 9,
}
PATCHES: dict[str, Any] = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
GEMMA = {
    "model_type": "gemma3",
    "vision_config": {"image_size": 896},
    "image_token_index": 7,
    "boi_token_index": 8,
    "eoi_token_index": 9,
    "mm_tokens_per_image": 256,
}
WHOLE: dict[str, Any] = {
    "do_convert_rgb": None,
    "do_normalize": True,
    "do_pan_and_scan": None,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 2,
    "rescale_factor": 0.00392156862745098,
    "size": {"height": 896, "width": 896},
}


def write(folder: Path, config: dict[str, Any], given: dict[str, Any], **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(given | changes))
    return folder


def test_the_published_forms_are_read(tmp_path: Path) -> None:
    found = read_settings(write(tmp_path, QWEN, PATCHES))
    assert found is not None and found.form is EncoderForm.PATCHES
    assert (found.token_id, found.begin_id, found.end_id) == (7, 8, 9)
    assert (found.min_pixels, found.max_pixels) == (65536, MAX_ENCODED_PIXELS)
    assert found.means == (127.5,) * 3 and found.resample == 3
    found = read_settings(write(tmp_path, GEMMA, WHOLE))
    assert found is not None and found.form is EncoderForm.WHOLE
    assert (found.height, found.width, found.num_tokens, found.gap) == (896, 896, 256, "\n\n")


def test_a_processor_in_one_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": PATCHES}))
    assert read_settings(tmp_path) is not None


def test_a_text_model_has_no_settings(tmp_path: Path) -> None:
    assert read_settings(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert read_settings(tmp_path) is None


@pytest.mark.parametrize(
    ("config", "given", "changes", "problem"),
    [
        (QWEN | {"model_type": "llava"}, PATCHES, {}, "model_type 'llava'"),
        (GEMMA, WHOLE, {"do_pan_and_scan": True}, "do_pan_and_scan is true"),
        (GEMMA, WHOLE, {"do_resize": False}, "do_resize is false"),
        (GEMMA, WHOLE, {"do_normalize": False}, "do_normalize is false"),
        (GEMMA, WHOLE, {"resample": 99}, "resample is 99"),
        (GEMMA, WHOLE, {"size": {"shortest_edge": 5}}, "height"),
        (GEMMA, WHOLE, {"image_std": [1, 1]}, "ValueError"),
        (QWEN, PATCHES, {"patch_size": 14}, "the encoder's is 16"),
        (QWEN, PATCHES, {"size": None}, "shortest_edge"),
        (QWEN, PATCHES, {"image_mean": None}, "TypeError"),
    ],
)
def test_what_is_not_done_is_refused_by_name(
    tmp_path: Path,
    config: dict[str, Any],
    given: dict[str, Any],
    changes: dict[str, Any],
    problem: str,
) -> None:
    with pytest.raises(UnservedPictures, match=problem):
        read_settings(write(tmp_path, config, given, **changes))


def test_a_folder_without_a_preprocessor_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    with pytest.raises(UnservedPictures, match=r"preprocessor_config\.json is missing"):
        read_settings(tmp_path)
