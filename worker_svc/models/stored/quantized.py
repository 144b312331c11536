"""Fills a model's linear layers from a quantized checkpoint, one part after the other.

A part is read, cut and checked before the next one: the host needs the memory of the model's
weights and of one layer.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from kernels.quantized.scaled import ScaledWeight
from worker_svc.models.experts import Listed
from worker_svc.models.interleaved import Interleaved
from worker_svc.models.linear import WeightRows, dequantize
from worker_svc.models.spec import TensorNames
from worker_svc.models.stored.checkpoint import Checkpoint, WrongValues
from worker_svc.models.weights import (
    Destination,
    Share,
    UnexpectedWeight,
    WrongShape,
    load_weights,
    refuse_ignored,
)
from worker_svc.quantization.scheme import (
    PLAIN,
    DamagedWeight,
    Quantization,
    RankCut,
    Scheme,
    StoredWeight,
    TensorSpec,
    UnsupportedQuantization,
)

log = logging.getLogger(__name__)

EMBEDDING = TensorNames().embedding_weight
END = ".weight"

ShareOf = Callable[[str], Share | None]


def keeps_float8(device: torch.device) -> bool:
    """False for a CPU, which has nothing to multiply 8-bit floats with."""
    return device.type != "cpu"


@dataclass(frozen=True, slots=True)
class Among:
    """The place of a matrix among others in one tensor."""

    index: int
    count: int


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part of a linear layer: where it is stored, how, and what this rank takes of it."""

    name: str
    rows: WeightRows | Interleaved
    scheme: Scheme
    cut: RankCut
    expert: Among | None = None  # whose weight is in one tensor with the others', of plain numbers

    def specs(self) -> dict[str, TensorSpec]:
        """Its tensors by name. Raises WrongShape."""
        try:
            specs = self.scheme.tensors(*self.cut.whole)
        except DamagedWeight as error:
            raise WrongShape(f"{self.name}.{error}") from None
        if self.expert is not None:
            return {self.name: specs["weight"].of_matrices(self.expert.count)}
        return {f"{self.name}.{suffix}": spec for suffix, spec in specs.items()}

    def read(self, checkpoint: Checkpoint) -> StoredWeight:
        """The weight. Raises WeightError naming the tensor."""
        prefix = f"{self.name}."
        if self.expert is not None:
            ((name, spec),) = self.specs().items()
            found = {"weight": checkpoint.part(name, spec, self.cut, self.expert.index)}
        else:
            found = {
                name.removeprefix(prefix): checkpoint.part(name, spec, self.cut)
                for name, spec in self.specs().items()
            }
        try:
            return self.scheme.read(found, self.cut)
        except DamagedWeight as error:
            raise WrongValues(f"{prefix}{error}") from None

    def fill(self, checkpoint: Checkpoint, device: torch.device) -> bool:
        """Reads the weight to its place; True if it takes that of float numbers there."""
        return self.put(self.read(checkpoint), device)

    def put(self, weight: StoredWeight, device: torch.device) -> bool:
        """Puts a weight to its place; True if it takes that of float numbers there."""
        if isinstance(weight, Tensor):
            self.rows.copy_(weight)
            return True
        if isinstance(weight, ScaledWeight) and not keeps_float8(device):
            if isinstance(self.rows, WeightRows):
                dequantize(weight, self.rows.values)
            else:
                self.rows.copy_(weight.dequantized(self.rows.dtype))
            return True
        self.rows.put_narrow(weight.to(device))
        return False


class QuantizedLayers:
    """The linear layers of a model as a checkpoint stores them, for one rank."""

    def __init__(
        self,
        quantization: Quantization,
        destinations: Mapping[str, Destination],
        share: ShareOf,
        embedding: str = EMBEDDING,
    ) -> None:
        """The table `embedding` holds plain numbers in every format."""
        self._quantization = quantization
        self._destinations = destinations
        linear = {
            name: to
            for name, to in destinations.items()
            if isinstance(to, WeightRows | Interleaved | Listed) and name != embedding
        }
        self._own = linear.keys()
        self._parts = [
            part
            for name, to in linear.items()
            for part in self._parts_of(name.removesuffix(END), to, share(name))
        ]

    def _parts_of(
        self, name: str, to: WeightRows | Interleaved | Listed, share: Share | None
    ) -> Iterator[StoredPart]:
        """The parts of a tensor. Raises UnsupportedQuantization."""
        scheme = self._quantization.scheme(name)
        if not isinstance(to, Listed):
            for rows, cut in _cuts(to, share):
                yield StoredPart(name, rows, scheme, cut)
            return
        shape = to.parts[0].shape
        if scheme.tensors(*shape) != PLAIN.tensors(*shape):
            raise UnsupportedQuantization(
                f"quantization: {self._quantization.label} is not supported for experts that one "
                f"tensor holds ({name})"
            )
        own = of_matrix(share)
        for index, matrix in enumerate(to.parts):
            for rows, cut in _cuts(matrix, own):
                yield StoredPart(name, rows, scheme, cut, Among(index, len(to.parts)))

    def require_capability(self, capability: int) -> None:
        """Raises UnsupportedQuantization for a device, major * 10 + minor, of too low a one."""
        for part in self._parts:
            if part.scheme.min_capability > capability:
                raise UnsupportedQuantization(
                    f"quantization: {self._quantization.label} ({part.name}) needs compute "
                    f"capability {part.scheme.min_capability}, this device has {capability}"
                )

    def names(self) -> frozenset[str]:
        """Names of all tensors that `fill` reads. Raises WrongShape."""
        return frozenset(name for part in self._parts for name in part.specs())

    def other_destinations(self) -> dict[str, Destination]:
        """The destinations of what is not a linear layer's weight."""
        return {name: to for name, to in self._destinations.items() if name not in self._own}

    def empty_biases(self, checkpoint: Checkpoint) -> frozenset[str]:
        """Biases that the model lacks, which some writers add. Raises UnexpectedWeight if not 0."""
        lacking = {f"{part.name}.bias" for part in self._parts} - self._destinations.keys()
        found = lacking.intersection(checkpoint.names)
        for name in sorted(found):
            if bool(checkpoint.whole(name).any()):
                raise UnexpectedWeight(f"{name}: the model has no such parameter")
        return frozenset(found)

    def fill(self, checkpoint: Checkpoint, device: torch.device) -> Iterator[StoredPart]:
        """Reads each part in turn; yields those that are float numbers in memory."""
        for part in self._parts:
            if part.fill(checkpoint, device):
                yield part


def of_matrix(share: Share | None) -> Share | None:
    """The share of each matrix, of that of a tensor of several."""
    return None if share is None else replace(share, dim=share.dim - 1)


def _cuts(
    rows: WeightRows | Interleaved, share: Share | None
) -> Iterator[tuple[WeightRows | Interleaved, RankCut]]:
    """A rank's rows and where they lie: a part of each section that is divided."""
    cut = cut_of(rows.shape, share)
    if share is None or not share.sections:
        yield rows, cut
        return
    assert isinstance(rows, WeightRows) and share.dim == 0
    at = begin = 0
    for size in share.sections:
        length = size // share.count
        first = begin + share.index * length
        outputs = range(first, first + length)
        yield rows.within(at, at + length), replace(cut, outputs=outputs)
        at, begin = at + length, begin + size


def cut_of(part: tuple[int, int], share: Share | None) -> RankCut:
    """The cut that a rank takes, by the shape of its part."""
    outputs, inputs = part
    if share is None:
        return RankCut(part, range(outputs), range(inputs))
    size = part[share.dim]
    taken = range(share.index * size, (share.index + 1) * size)
    whole = share.whole(part)
    if share.dim == 0:
        return RankCut((whole[0], whole[1]), taken, range(inputs))
    return RankCut((whole[0], whole[1]), range(outputs), taken)


def load_quantized(
    folder: Path,
    quantization: Quantization,
    destinations: Mapping[str, Destination],
    ignored: frozenset[str],
    share: ShareOf,
    device: torch.device,
    embedding: str = EMBEDDING,
) -> None:
    """Fills all destinations from a quantized checkpoint. Raises WeightError.

    Raises UnsupportedQuantization for a device that cannot compute with it.
    """
    layers = QuantizedLayers(quantization, destinations, share, embedding)
    refuse_ignored(layers.names(), ignored)
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        layers.require_capability(10 * major + minor)
    with Checkpoint(folder) as checkpoint:
        own = layers.names() | layers.empty_biases(checkpoint)
        load_weights(folder, layers.other_destinations(), ignored | own, share)
        plain = list(layers.fill(checkpoint, device))
    _report([part for part in plain if part.scheme is not PLAIN])


def _report(widened: list[StoredPart]) -> None:
    """Says what has become float numbers although it is stored in fewer bits."""
    if not widened:
        return
    num_bytes = sum(prod(part.cut.shape) * part.rows.dtype.itemsize for part in widened)
    log.warning(
        "quantization: %d weights are kept as float numbers, %.3f GiB (first %s)",
        len(widened),
        num_bytes / 2**30,
        widened[0].name,
    )
