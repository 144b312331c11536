"""The division of a model's layers into KV groups, and what lies where in a page of each.

Layers that see all tokens are one group, those of one window another. A page is of as many numbers
for every group: one with fewer numbers to a token has more tokens in a page, always a multiple of
the block size, so that all groups have block ends in common. What is left over in a page is unused.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from worker_svc.attention.layer_cache import KvShape
from worker_svc.attention.layer_kv import LayerPlace
from worker_svc.protocol.kv_groups import LayerGroup

# A page of more tokens would be mostly empty in short sequences, and seldom hit.
MOST_BLOCK_SIZES = 16
# Of the numbers in a page; with more unused ones, one table for all layers is no worse.
MOST_UNUSED = 0.2


@dataclass(frozen=True, slots=True)
class KvPlan:
    """Groups of layers over pages of one size."""

    groups: tuple[LayerGroup, ...]  # group 0 first
    shapes: tuple[KvShape, ...]  # of the layers that store, in order
    places: tuple[LayerPlace, ...]  # theirs
    page_width: int  # numbers of a page
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.page_width * self.dtype.itemsize

    def of_layers(self, indices: Sequence[int]) -> "KvPlan":
        """The pages as some of the layers see them."""
        shapes = tuple(self.shapes[index] for index in indices)
        return replace(self, shapes=shapes, places=tuple(self.places[index] for index in indices))

    def in_words(self, num_pages: int) -> str:
        """The sizes of a pool of so many pages."""
        groups = []
        for number, group in enumerate(self.groups):
            num_layers = sum(place.group == number for place in self.places)
            sees = "all" if group.window is None else f"the last {group.window}"
            groups.append(f"{group.block_size} tokens in {num_layers} layers that see {sees}")
        return f"{num_pages} pages of {self.page_bytes} bytes: {', or '.join(groups)}"


def plan_of(
    shapes: Sequence[KvShape],
    windows: Sequence[int | None],
    block_size: int,
    dtype: torch.dtype,
) -> KvPlan | None:
    """Groups of layers with these windows; None where pages cannot be made equal.

    The group with the most numbers to a token has blocks of `block_size` tokens, or of a small
    multiple.
    """
    kinds = sorted(set(windows), key=lambda window: (window is not None, window))
    widths = [
        sum(shape.width for shape, window in zip(shapes, windows, strict=True) if window == kind)
        for kind in kinds
    ]
    unit = math.lcm(*(shape.width for shape in shapes))
    for multiple in (1, 2, 3, 4):
        page_width = -(-multiple * block_size * max(widths) // unit) * unit
        counts = [min(page_width // (block_size * width), MOST_BLOCK_SIZES) for width in widths]
        used = [count * block_size * width for count, width in zip(counts, widths, strict=True)]
        if min(used) >= (1 - MOST_UNUSED) * page_width:
            sizes = [count * block_size for count in counts]
            groups = tuple(map(LayerGroup, sizes, kinds))
            places = _places(shapes, [kinds.index(window) for window in windows], sizes, page_width)
            return KvPlan(groups, tuple(shapes), places, page_width, dtype)
    return None


def _places(
    shapes: Sequence[KvShape], groups: Sequence[int], sizes: Sequence[int], page_width: int
) -> tuple[LayerPlace, ...]:
    """Layers of a group lie one after the other in its pages."""
    ends, places = [0] * len(sizes), []
    for shape, group in zip(shapes, groups, strict=True):
        rows_per_block = page_width // shape.width
        places.append(LayerPlace(group, sizes[group], ends[group], rows_per_block))
        ends[group] += sizes[group] * shape.width
    return tuple(places)
