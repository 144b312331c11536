"""The linear layers of a model that adapters can add to, and the modules that they are made of."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from worker_svc.adapters.sites import AdapterTarget, AdapterTargets, Site
from worker_svc.adapters.weights import Product, StepAdapters
from worker_svc.models.linear import Linear, WeightRows
from worker_svc.models.weights import Destination, Share

if TYPE_CHECKING:
    from worker_svc.models.adapted_stack import AdaptedStack

_WEIGHT = ".weight"


class AdaptableLayers:
    """The linear layers with their places; they have adapters once `take` is called."""

    def __init__(
        self,
        linears: Mapping[Linear, Site],
        destinations: Iterable[tuple[str, Destination]],
        share: Callable[[str], Share | None],
        dtype: torch.dtype,
        pack: Callable[[Tensor], Product],
    ) -> None:
        """`destinations` are those of the model, `share` is a rank's part of a tensor, by its name.

        `dtype` is the type of activations, and `pack` makes of a weight what multiplies by it. A
        module whose outputs do not lie side by side in ours takes no adapter.
        """
        self.dtype, self.pack = dtype, pack
        self.step: StepAdapters | None = None  # whom the layers ask; None: rows have no adapters
        self.stack: AdaptedStack | None = None  # of a device that computes them
        self.targets: AdapterTargets = _targets_of(linears, destinations, share)
        self._linears = linears

    def take(self) -> StepAdapters:
        """Has each layer add what the adapters of a step make of its inputs, from now on."""
        self.step = adapters = StepAdapters()
        self.ask(adapters.add)
        return adapters

    def ask(self, add: Callable[[Site, Tensor, Tensor], None]) -> None:
        """Has each layer call this with its site, inputs and outputs, from now on."""
        for linear, site in self._linears.items():
            linear.adapt = partial(add, site)


def _targets_of(
    linears: Mapping[Linear, Site],
    destinations: Iterable[tuple[str, Destination]],
    share: Callable[[str], Share | None],
) -> dict[str, AdapterTarget]:
    found = {}
    for name, place in destinations:
        if not isinstance(place, WeightRows) or not name.endswith(_WEIGHT):
            continue
        if (site := linears.get(place.linear)) is not None:
            found[name.removesuffix(_WEIGHT)] = AdapterTarget(
                site, place.begin, place.end, place.linear.shape[1], share(name)
            )
    return found
