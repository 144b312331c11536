"""The layout of an adapter's weights on a device: one piece, which one copy brings there.

`kernels.adapters.stacks` says where A and B of each layer lie. A norm before a layer whose product
has the norm's weight in it is in A as well.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.adapters.stacks import RANK_MULTIPLE
from worker_svc.adapters.sites import AdapterTargets, Site
from worker_svc.adapters.weights import PackedAdapter, PlainProduct, SiteWeights


@dataclass(frozen=True, slots=True)
class PackedSite:
    """The place of one layer's A [parts * R, K] and B [N, R], for a stride of R ranks."""

    site: Site
    num_inputs: int
    parts: tuple[tuple[int, int], ...]  # outputs [begin, end) of each module, ascending
    a_at: int  # values before A and B, for each rank of the stride

    @property
    def num_outputs(self) -> int:
        """N: outputs up to the last that a module has."""
        return self.parts[-1][1]

    @property
    def b_at(self) -> int:
        """Values before B, counted as those of `a_at`."""
        return self.a_at + len(self.parts) * self.num_inputs

    @property
    def end(self) -> int:
        """The first value of the next layer, counted so."""
        return self.b_at + self.num_outputs


class PackedLayout:
    """The places of all layers of a model, or of one rank's part of it."""

    def __init__(
        self,
        targets: AdapterTargets,
        norms: Mapping[Site, Tensor],
        dtype: torch.dtype,
        *,
        pins: bool,
    ) -> None:
        """`norms` [K] are the weights of the norms before layers that are in their products.

        `pins`: packed adapters lie where a device can copy them from.
        """
        self.dtype, self._pins = dtype, pins
        self._norms = {site: norm.float().cpu() for site, norm in norms.items()}
        self.sites: tuple[PackedSite, ...] = tuple(_sites(targets))

    @property
    def values_per_rank(self) -> int:
        """The number of values of an adapter, for each rank of its stride."""
        return self.sites[-1].end

    def packed(self, weights: Mapping[Site, SiteWeights]) -> PackedAdapter:
        """An adapter of plain products in this layout."""
        most = max(one.last - one.first for its in weights.values() for one in its.expansions)
        stride = stride_of(most)
        values = torch.zeros(stride * self.values_per_rank, dtype=self.dtype, pin_memory=self._pins)
        ranks = torch.zeros(1 + len(self.sites), dtype=torch.int32, pin_memory=self._pins)
        ranks[0] = stride
        for index, place in enumerate(self.sites, start=1):
            if (its := weights.get(place.site)) is not None:
                ranks[index] = self._fill(values, stride, place, its)
        return PackedAdapter(values, ranks)

    def _fill(self, values: Tensor, stride: int, place: PackedSite, weights: SiteWeights) -> int:
        """Writes one layer's weights; returns the largest rank of its modules."""
        a_rows = values[stride * place.a_at : stride * place.b_at].view(-1, place.num_inputs)
        b_rows = values[stride * place.b_at : stride * place.end].view(-1, stride)
        a = _weight(weights.a)
        if (norm := self._norms.get(place.site)) is not None:
            a = a.float() * norm
        for one in weights.expansions:
            first, rank = place.parts.index((one.begin, one.end)) * stride, one.last - one.first
            a_rows[first : first + rank] = a[one.first : one.last]
            b_rows[one.begin : one.end, :rank] = _weight(one.b)
        return max(one.last - one.first for one in weights.expansions)


def stride_of(rank: int) -> int:
    """The stride of an adapter whose modules have at most this rank."""
    return -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE


def _sites(targets: AdapterTargets) -> list[PackedSite]:
    modules: dict[Site, list[tuple[int, int]]] = {}
    num_inputs: dict[Site, int] = {}
    for target in targets.values():
        modules.setdefault(target.site, []).append((target.begin, target.end))
        num_inputs[target.site] = target.num_inputs
    found, at = list[PackedSite](), 0
    for site, parts in modules.items():
        found.append(PackedSite(site, num_inputs[site], tuple(sorted(parts)), at))
        at = found[-1].end
    return found


def _weight(product: object) -> Tensor:
    assert isinstance(product, PlainProduct)  # what reads adapters for a device packs none
    return product.weight
