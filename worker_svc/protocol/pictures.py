"""Pictures as a scheduler sends them: to encode, and where they stand in prompts."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from pagewire.v1 import types_pb2, worker_pb2
from worker_svc.protocol.step import BadStep, PlacedPicture

NUM_COLOURS = 3
Colours = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Pixels:
    """The pixels of a picture, as bytes; each stands for (byte - mean) / deviation."""

    values: bytes
    num_rows: int
    grid: tuple[int, int, int] | None  # patches in time, height and width; None: it is whole
    means: Colours
    deviations: Colours

    @property
    def rows(self) -> NDArray[np.uint8]:
        """The bytes [rows, 3, pixels of a row and colour], not to be written."""
        return np.frombuffer(self.values, np.uint8).reshape(self.num_rows, NUM_COLOURS, -1)


@dataclass(frozen=True, slots=True)
class PictureOrder:
    """A picture to encode."""

    preparation_id: int
    content_id: bytes
    num_tokens: int  # placeholders that stand for it
    pixels: Pixels | None
    refusal: str = ""  # why it has no pixels


def to_picture_order(message: worker_pb2.PicturePreparation) -> PictureOrder:
    """The order of a message; pixels that contradict themselves are refused, not the frame."""
    if not message.preparation_id:
        raise BadStep("prepare.pictures.preparation_id", "must not be 0")
    number, content_id = message.preparation_id, message.content_id
    try:
        pixels = _to_pixels(message.pixels)
    except ValueError as error:
        return PictureOrder(number, content_id, message.num_tokens, None, str(error))
    return PictureOrder(number, content_id, message.num_tokens, pixels)


def _to_pixels(message: types_pb2.PicturePixels) -> Pixels:
    """The pixels of a message. Raises ValueError."""
    num_rows, num_bytes = message.num_rows, len(message.values)
    if not num_rows or not num_bytes or num_bytes % (num_rows * NUM_COLOURS):
        raise ValueError(f"{num_bytes} bytes are no {num_rows} rows of {NUM_COLOURS} colours")
    grid = tuple(message.grid)
    if len(grid) not in (0, 3):
        raise ValueError(f"grid has {len(grid)} numbers, must have 3 or none")
    return Pixels(
        message.values,
        num_rows,
        (grid[0], grid[1], grid[2]) if grid else None,
        _colours("means", message.means),
        _colours("deviations", message.deviations),
    )


def _colours(name: str, given: Iterable[float]) -> Colours:
    numbers = [*given]
    if len(numbers) != NUM_COLOURS or not all(map(isfinite, numbers)):
        raise ValueError(f"{name} are no {NUM_COLOURS} finite numbers")
    if name == "deviations" and 0 in numbers:
        raise ValueError("deviations has a 0")
    return numbers[0], numbers[1], numbers[2]


def to_placed_pictures(message: worker_pb2.NewSequence) -> tuple[PlacedPicture, ...]:
    """The pictures of a sequence, in order of position."""
    return tuple(
        PlacedPicture(placed.position, placed.preparation_id) for placed in message.pictures
    )
