"""The weights of an adapter, and what they add to the outputs of a linear layer.

y += scale B (A x), for the rows of a batch that have the adapter. A module that is some outputs of
a fused layer has its own A and B: inputs are shrunk for all modules of a layer at once, and each
result is expanded into its module's outputs. The scale is a factor of B. Products are those of the
model's own layers, whose sums may have one order whatever is computed together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from wire.adapters import AdapterSource
from worker_svc.adapters.sites import Site

Product = Callable[[Tensor], Tensor]  # x [n, K] @ weight [N, K], transposed -> [n, N]


@dataclass(frozen=True, slots=True)
class PlainProduct:
    """The product by torch."""

    weight: Tensor  # [N, K]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


@dataclass(frozen=True, slots=True)
class Expansion:
    """One module's way back: to outputs [begin, end) from the ranks [first, last) of its layer."""

    begin: int
    end: int
    first: int
    last: int
    b: Product  # by B [end - begin, last - first], times the scale


@dataclass(frozen=True, slots=True)
class SiteWeights:
    """The adapter of one linear layer."""

    a: Product  # by A [R, K] of all its modules, one after the other
    expansions: tuple[Expansion, ...]


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """All weights of an adapter in one piece of host memory, as a device has them."""

    values: Tensor  # [values]
    ranks: Tensor  # [1 + layers] int32: its stride of ranks, then each layer's; 0: it lacks it


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter in memory."""

    source: AdapterSource
    rank: int  # the largest of its modules
    sites: Mapping[Site, SiteWeights]
    packed: PackedAdapter | None = None  # in place of `sites`, for a device


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The tokens of a step that one adapter computes."""

    adapter: LoadedAdapter
    tokens: Tensor | None  # [n] int64, indices into the step's tokens; None: all of them

    def add(self, site: Site, x: Tensor, y: Tensor) -> None:
        """Adds to y [T, N] in place what the adapter makes of x [T, K]; both contiguous."""
        weights = self.adapter.sites.get(site)
        if weights is None:
            return
        own = x if self.tokens is None else x.index_select(0, self.tokens)
        shrunk = weights.a(own)  # [n, R]
        for one in weights.expansions:
            added = one.b(shrunk[:, one.first : one.last].contiguous())
            outputs = y[:, one.begin : one.end]
            if self.tokens is None:
                outputs += added
            else:
                outputs.index_add_(0, self.tokens, added)


class StepAdapters:
    """Who of the running step's rows has which adapter; the layers of a model ask it."""

    def __init__(self) -> None:
        self.rows: tuple[AdapterRows, ...] = ()

    def add(self, site: Site, x: Tensor, y: Tensor) -> None:
        """Adds to y [T, N] in place what the step's adapters make of x [T, K]."""
        for rows in self.rows:
            rows.add(site, x, y)
