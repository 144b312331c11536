"""Adapters on the device: each in a place of its own, brought there when a sequence enters.

A place is for good until another adapter needs one: then the one that was used longest ago, of
those that no sequence has, leaves. It knows neither slots nor who waits.
"""

from collections import OrderedDict
from collections.abc import Collection

import torch
from torch import Tensor

from kernels.adapters.low_rank import OUTPUTS, add_low_rank
from kernels.adapters.stacks import AdaptedLayer, AdapterStacks, RowGroups
from worker_svc.adapters.packing import PackedLayout, PackedSite, stride_of
from worker_svc.adapters.sites import Site
from worker_svc.adapters.weights import LoadedAdapter


class DeviceAdapters:
    """The places of adapters, and what those of the running step's rows add to layers."""

    def __init__(
        self, layout: PackedLayout, num_places: int, max_rank: int, device: torch.device
    ) -> None:
        """Takes all memory at once: `size_bytes`."""
        self.layout, most = layout, stride_of(max_rank)
        self._stacks = AdapterStacks(
            torch.empty(
                (num_places, most * layout.values_per_rank), dtype=layout.dtype, device=device
            ),
            torch.zeros((num_places, 1 + len(layout.sites)), dtype=torch.int32, device=device),
            most,
        )
        self._layers = {
            place.site: _layer(index, place, device)
            for index, place in enumerate(layout.sites, start=1)
        }
        self._places: OrderedDict[str, int] = OrderedDict()  # by adapter id, last used last
        self._free = list(range(num_places))
        self.rows: RowGroups | None = None  # of the pass that is launched; None: it has no adapters

    @property
    def num_places(self) -> int:
        """Adapters that there can be together."""
        return len(self._stacks.values)

    @property
    def size_bytes(self) -> int:
        """Bytes of the device's memory."""
        return self._stacks.values.nbytes + self._stacks.ranks.nbytes

    def bring(self, adapter: LoadedAdapter, in_use: Collection[str]) -> int:
        """The place of an adapter, which steps launched from now on find there.

        `in_use` are the ids of those that sequences have: these stay.
        """
        adapter_id, packed = adapter.source.adapter_id, adapter.packed
        if adapter_id in self._places:
            self._places.move_to_end(adapter_id)
            return self._places[adapter_id]
        place = self._free_place(in_use)
        assert packed is not None  # what is read for a device is packed
        # In the order of the stream: steps that are on their way still read what is overwritten.
        self._stacks.values[place, : len(packed.values)].copy_(packed.values, non_blocking=True)
        self._stacks.ranks[place].copy_(packed.ranks, non_blocking=True)
        self._free.remove(place)
        self._places[adapter_id] = place
        return place

    def _free_place(self, in_use: Collection[str]) -> int:
        """A place without an adapter, from now on."""
        if not self._free:
            leaving = next((one for one in self._places if one not in in_use), None)
            if leaving is None:
                raise RuntimeError(f"all {self.num_places} places of adapters are in use")
            self._free.append(self._places.pop(leaving))
        return self._free[0]

    def add(self, site: Site, x: Tensor, y: Tensor, eps: float | None = None) -> None:
        """Adds to y [T, N] in place what the rows' adapters make of x [T, K].

        With `eps`, x is the row before its norm; see `add_low_rank`.
        """
        if self.rows is not None and (layer := self._layers.get(site)) is not None:
            add_low_rank(x, y, layer, self._stacks, self.rows, eps)


def _layer(index: int, place: PackedSite, device: torch.device) -> AdaptedLayer:
    blocks = [
        (part, first, min(first + OUTPUTS, end))
        for part, (begin, end) in enumerate(place.parts)
        for first in range(begin, end, OUTPUTS)
    ]
    return AdaptedLayer(
        index,
        place.num_inputs,
        place.num_outputs,
        place.parts,
        place.a_at,
        place.b_at,
        torch.tensor(blocks, dtype=torch.int32, device=device),
    )
