"""Pixels equal those of transformers' classes; what is no picture is refused, by what it is."""

import io
import struct
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from gateway.tokens.pictures.answers import UnreadPicture, pack_answer, unpack_answer
from gateway.tokens.pictures.processing import FORMATS, process
from gateway.tokens.pictures.settings import EncoderForm, PictureSettings
from tests.gateway.tokens.pictures.files import (
    MAX_PIXELS,
    SETTINGS,
    animated,
    file_of,
    gif_of_frames,
    picture,
    png_chunk,
    png_of_size,
)

WHOLE = replace(SETTINGS, form=EncoderForm.WHOLE, height=12, width=20, num_tokens=4, resample=2)
SIZES = [(8, 8), (1, 1), (1, 150), (150, 1), (33, 47), (64, 64), (65, 63), (300, 200), (4, 799)]


def values(made: Any, settings: PictureSettings) -> np.ndarray:
    """The values that the worker gives to the encoder."""
    pixels = np.frombuffer(made.values, np.uint8).reshape(made.num_rows, 3, -1).astype(np.float32)
    means, deviations = (
        np.array(c, np.float32)[None, :, None] for c in (settings.means, settings.deviations)
    )
    return (pixels - means) / deviations


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", FORMATS)
def test_patches_are_those_of_transformers(size: tuple[int, int], kind: str) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (  # noqa: PLC0415 - slow
        Qwen2VLImageProcessorPil,
    )

    theirs = Qwen2VLImageProcessorPil(
        patch_size=4,
        temporal_patch_size=2,
        merge_size=2,
        size={"shortest_edge": 64, "longest_edge": 4096},
        image_mean=[0.5, 0.4, 0.3],
        image_std=[0.5, 0.25, 0.2],
    )
    content = file_of(picture(*size, seed=sum(size)), kind)
    expected = theirs(_opened(content), return_tensors="np")
    made = process(content, SETTINGS, MAX_PIXELS)
    assert made.grid == tuple(expected["image_grid_thw"][0])
    found = values(made, SETTINGS).reshape(made.num_rows, -1)
    assert np.abs(found - expected["pixel_values"]).max() < 1e-6
    assert made.num_tokens == made.num_rows // 4


@pytest.mark.parametrize("size", SIZES)
def test_whole_pictures_are_those_of_transformers(size: tuple[int, int]) -> None:
    from transformers.models.gemma3.image_processing_pil_gemma3 import (  # noqa: PLC0415 - slow
        Gemma3ImageProcessorPil,
    )

    theirs = Gemma3ImageProcessorPil(
        size={"height": 12, "width": 20},
        image_mean=[0.5, 0.4, 0.3],
        image_std=[0.5, 0.25, 0.2],
    )
    content = file_of(picture(*size, seed=sum(size)))
    expected = theirs(_opened(content), return_tensors="np")["pixel_values"]
    made = process(content, WHOLE, MAX_PIXELS)
    assert (made.num_tokens, made.num_rows, made.grid) == (4, 1, None)
    found = values(made, WHOLE).reshape(expected.shape)
    assert np.abs(found - expected).max() < 1e-6


def _opened(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content)).convert("RGB")


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "LA", "1", "CMYK", "I;16"])
def test_pictures_of_other_modes_become_three_colours(mode: str) -> None:
    plain = picture(16, 16).convert("L")
    made = plain.convert("I").convert("I;16") if mode == "I;16" else plain.convert(mode)
    kind = "JPEG" if mode == "CMYK" else "PNG"
    found = process(file_of(made, kind), SETTINGS, MAX_PIXELS)
    assert len(found.values) == found.num_rows * 3 * 32


def test_a_picture_is_turned_as_its_camera_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    upright = picture(16, 40, seed=3)
    turned = ImageOps.exif_transpose(_opened(file_of(upright)))
    content = file_of(upright, "PNG", exif=exif)
    assert process(content, SETTINGS, MAX_PIXELS).grid == (1, 4, 10)
    assert process(file_of(turned), SETTINGS, MAX_PIXELS).grid == (1, 10, 4)


GOOD = file_of(picture(16, 16))
HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "none of PNG"),
    "one byte": (b"\x89", "none of PNG"),
    "a header alone": (GOOD[:8], "none of PNG"),
    "a PNG cut in its header": (GOOD[:20], "none of PNG|cut off"),
    "a PNG cut in its pixels": (GOOD[: len(GOOD) // 2], "the end is missing"),
    "a PNG without its end": (GOOD[:-12], "the end is missing"),
    "a PNG of 10^9 pixels": (png_of_size(31_623, 31_623), "31623 x 31623 pixels, and --max"),
    "a PNG of 2^62 pixels": (png_of_size(2**31 - 1, 2**31 - 1), "pixels, and --max|none of"),
    "a PNG of 2^32 - 1 pixels a side": (png_of_size(2**32 - 1, 1), "pixels|none of"),
    "a PNG of no pixels": (png_of_size(0, 0), "0 x 0|none of"),
    "a PNG that is a line": (png_of_size(4096, 2), "more than 200 times"),
    "a PNG whose pixels are missing": (png_of_size(16, 16), "cut off or damaged"),
    "a PNG whose pixels are garbage": (png_of_size(16, 16, b"garbage"), "cut off or damaged"),
    "a PNG with a wrong checksum": (GOOD[:40] + b"\0" + GOOD[41:], "cut off|none of"),
    "a PNG followed by a zip": (GOOD + b"PK\x03\x04" + b"x" * 30, "something follows the end"),
    "a PNG followed by a page": (GOOD + b"<html><script>", "something follows the end"),
    "a PNG of a text of 64 MiB": (
        GOOD[:33] + png_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(64 << 20), 9)) + GOOD[33:],
        "cut off|none of",
    ),
    "an SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///'/></svg>", "none"),
    "an SVG bomb of entities": (b"<!DOCTYPE x [<!ENTITY a 'aaaa'>]><svg>&a;</svg>", "none of"),
    "a page": (b"<html></html>", "none of PNG"),
    "a PDF": (b"%PDF-1.4\n%\xe2\xe3", "none of PNG"),
    "a PostScript program": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "none of PNG"),
    "a TIFF": (file_of(picture(8, 8), "TIFF"), "none of PNG"),
    "a BMP": (file_of(picture(8, 8), "BMP"), "none of PNG"),
    "an icon": (file_of(picture(8, 8), "ICO"), "none of PNG"),
    "a JPEG cut off": (file_of(picture(64, 64), "JPEG")[:300], "cut off or damaged|none of"),
    "a JPEG of 10^9 pixels": (
        b"\xff\xd8\xff\xe0\0\x10JFIF\0\1\1\0\0\1\0\1\0\0"
        + b"\xff\xc0\0\x11\x08\x7b\x87\x7b\x87\x03\x01\x22\0\x02\x11\x01\x03\x11\x01",
        "31623 x 31623 pixels|none of|cut off",
    ),
    "a WebP cut off": (file_of(picture(64, 64), "WEBP")[:200], "none of PNG|cut off"),
    "a GIF header and a script": (b"GIF89a/*" + b"*/=1;alert(1)" * 10, "cut off|none of|pixels"),
    "a GIF of 10,000 frames": (gif_of_frames(10_000), "several frames"),
    "a PNG of frames": (animated(3, "PNG"), "several frames"),
    "a WebP of frames": (animated(3, "WEBP"), "several frames"),
    "random bytes": (np.random.default_rng(0).bytes(5000), "none of PNG"),
    "a WebP that claims 4 GiB": (
        b"RIFF" + struct.pack("<I", 2**32 - 1) + b"WEBPVP8 ",
        "none of|cut off",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_by_what_it_is(name: str) -> None:
    content, problem = HOSTILE[name]
    with pytest.raises(UnreadPicture, match=problem):
        process(content, SETTINGS, MAX_PIXELS)


def test_there_are_thirty_hostile_files() -> None:
    assert len(HOSTILE) >= 30


def test_answers_are_read_as_they_were_written() -> None:
    for settings in (SETTINGS, WHOLE):
        made = process(GOOD, settings, MAX_PIXELS)
        assert unpack_answer(pack_answer(made)) == made
