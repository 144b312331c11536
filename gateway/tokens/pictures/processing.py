"""Turns a file into the encoder's pixels, in the process that may die of it.

The steps are those of transformers' classes for Pillow, which tests compare: the library itself
would bring torch along, and take a second to load and 400 MB to hold.
"""

import io
import math
import warnings

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from gateway.tokens.pictures.answers import ProcessedPicture, UnreadPicture
from gateway.tokens.pictures.settings import EncoderForm, PictureSettings

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MOST_STRETCHED = 200  # times that one side is as long as the other
_PNG_END = b"IEND\xaeB`\x82"


def process(content: bytes, settings: PictureSettings, max_pixels: int) -> ProcessedPicture:
    """Reads a file of at most `max_pixels`. Raises UnreadPicture."""
    pixels = _read(content, max_pixels)
    if settings.form is EncoderForm.WHOLE:
        size = settings.width, settings.height
        whole = _planes(pixels.resize(size, settings.resample))
        return ProcessedPicture(settings.num_tokens, whole.tobytes(), 1, None)
    height, width = _patched_size(pixels.height, pixels.width, settings)
    planes = _planes(pixels.resize((width, height), settings.resample))
    grid = (1, height // settings.patch_size, width // settings.patch_size)
    num_rows = grid[1] * grid[2]
    values = _cut(planes, settings)
    return ProcessedPicture(num_rows // settings.merge_size**2, values.tobytes(), num_rows, grid)


def _read(content: bytes, max_pixels: int) -> Image.Image:
    """The picture in three colours, turned as its camera says. Raises UnreadPicture."""
    Image.MAX_IMAGE_PIXELS = None  # its size is judged below, before anything is decoded
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            picture = Image.open(io.BytesIO(content), formats=FORMATS)
            _judge(picture, content, max_pixels)
            picture.load()
            turned = ImageOps.exif_transpose(picture)
            return turned.convert("RGB")
    except UnidentifiedImageError:
        raise UnreadPicture(f"the file is none of {', '.join(FORMATS)}, or not whole") from None
    except (UnreadPicture, MemoryError):
        raise
    except Exception as error:  # decoders raise whatever they like
        raise UnreadPicture(f"the file is cut off or damaged ({type(error).__name__})") from None


def _judge(picture: Image.Image, content: bytes, max_pixels: int) -> None:
    """Raises UnreadPicture for what should not be decoded, by what the file says of itself."""
    width, height = picture.size
    if not width or not height:
        raise UnreadPicture(f"the picture is {width} x {height} pixels")
    if width * height > max_pixels:
        raise UnreadPicture(
            f"the picture is {width} x {height} pixels, and --max-picture-pixels is {max_pixels}"
        )
    if max(width, height) > MOST_STRETCHED * min(width, height):
        raise UnreadPicture(
            f"the picture is {width} x {height} pixels: one side is more than {MOST_STRETCHED} "
            "times the other"
        )
    if getattr(picture, "is_animated", False):
        raise UnreadPicture("the picture has several frames; send the one that is meant")
    if picture.format == "PNG" and not content.rstrip(b"\0\r\n").endswith(_PNG_END):
        raise UnreadPicture("something follows the end of the picture, or the end is missing")


def _planes(picture: Image.Image) -> NDArray[np.uint8]:
    """The colours [3, height, width] of a picture."""
    return np.ascontiguousarray(np.asarray(picture, dtype=np.uint8).transpose(2, 0, 1))


def _patched_size(height: int, width: int, settings: PictureSettings) -> tuple[int, int]:
    """Height and width, in whole tokens, within the bounds of pixels, of about the same shape."""
    side = settings.patch_size * settings.merge_size
    high, wide = round(height / side) * side, round(width / side) * side
    if high * wide > settings.max_pixels:
        shrink = math.sqrt(height * width / settings.max_pixels)
        high = max(side, math.floor(height / shrink / side) * side)
        wide = max(side, math.floor(width / shrink / side) * side)
    elif high * wide < settings.min_pixels:
        grow = math.sqrt(settings.min_pixels / (height * width))
        high = math.ceil(height * grow / side) * side
        wide = math.ceil(width * grow / side) * side
    return high, wide


def _cut(planes: NDArray[np.uint8], settings: PictureSettings) -> NDArray[np.uint8]:
    """Patches of planes [3, height, width], those of a token one after the other.

    Each [3, time, side, side]: a picture fills all of a patch's time.
    """
    side, merged = settings.patch_size, settings.merge_size
    height = planes.shape[1]
    parts = planes.reshape(3, height // side // merged, merged, side, -1, merged, side)
    parts = parts.transpose(1, 4, 2, 5, 0, 3, 6)  # row, column, those in a token, colour, pixels
    timed = np.repeat(parts[:, :, :, :, :, None], settings.temporal_patch_size, axis=5)
    return np.ascontiguousarray(timed)
