"""Files that claim to be pictures."""

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

from gateway.tokens.pictures.settings import EncoderForm, PictureSettings

SETTINGS = PictureSettings(
    form=EncoderForm.PATCHES,
    token_id=150,
    begin_id=151,
    end_id=152,
    resample=3,
    means=(127.5, 102.0, 76.5),
    deviations=(127.5, 63.75, 51.0),
    patch_size=4,
    temporal_patch_size=2,
    merge_size=2,
    min_pixels=64,
    max_pixels=4096,
)
MAX_PIXELS = 1 << 20


def picture(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """A picture of noise."""
    shape = (height, width, len(mode)) if len(mode) > 1 else (height, width)
    values = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return Image.fromarray(values, mode if mode != "P" else "L").convert(mode)


def file_of(made: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The content of a picture's file."""
    content = io.BytesIO()
    made.save(content, kind, **options)
    return content.getvalue()


def png_chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of_size(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG file that claims a size, with any data."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [b"\x89PNG\r\n\x1a\n", png_chunk(b"IHDR", header)]
    return b"".join([*parts, png_chunk(b"IDAT", data), png_chunk(b"IEND", b"")])


def animated(num_frames: int, kind: str) -> bytes:
    """A file of several frames."""
    frames = [picture(4, 4, seed) for seed in range(num_frames)]
    return file_of(frames[0], kind, save_all=True, append_images=frames[1:])


def gif_of_frames(num_frames: int) -> bytes:
    """A GIF of as many frames, written by hand: the library takes long for many."""
    head = b"GIF89a" + struct.pack("<HH", 1, 1) + b"\x80\x00\x00" + b"\0\0\0\xff\xff\xff"
    frame = b"\x2c" + struct.pack("<HHHH", 0, 0, 1, 1) + b"\x00" + b"\x02\x02\x44\x01\x00"
    return head + frame * num_frames + b"\x3b"
