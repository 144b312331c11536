"""Limits of the pictures of a request."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PictureLimits:
    """Most pictures of a request, and most bytes and pixels of each."""

    max_pictures: int = 8
    max_bytes: int = 16 << 20
    max_pixels: int = 1 << 25
