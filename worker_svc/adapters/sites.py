"""The linear layers that adapters add to, and the modules of a checkpoint that they are made of.

A layer of ours may be several of the checkpoint's side by side (Q, K and V; gate and up): such a
module is some of its outputs.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from torch import Tensor


class LinearPart(Enum):
    """The linear layers of one decoder layer, in the order in which they compute."""

    QKV = "qkv"
    OUTPUT = "output"  # of attention
    GATE_UP = "gate_up"
    DOWN = "down"


class Site(NamedTuple):
    """One linear layer of the model."""

    layer: int
    part: LinearPart


class RankShare(Protocol):
    """One rank's part of a module's weight [N, K]; `models.weights.Share` is one."""

    @property
    def dim(self) -> int:
        """0: its outputs, 1: its inputs."""

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the whole weight, for the shape of a part."""

    def cut(self, tensor: Tensor, length: int) -> Tensor:
        """This rank's part, of this length along the dimension."""


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """A module of the checkpoint: outputs [begin, end) of a linear layer of this rank."""

    site: Site
    begin: int
    end: int
    num_inputs: int  # of this rank
    division: RankShare | None  # None: each rank has all of it

    @property
    def whole_shape(self) -> tuple[int, int]:
        """(N, K) of the module, all ranks together."""
        shape = (self.end - self.begin, self.num_inputs)
        if self.division is None:
            return shape
        num_outputs, num_inputs = self.division.whole(shape)
        return num_outputs, num_inputs


AdapterTargets = Mapping[str, AdapterTarget]  # by the module's name in the checkpoint


def kinds_of(modules: Collection[str]) -> list[str]:
    """The last parts of modules' names, each once."""
    return sorted({name.rpartition(".")[2] for name in modules})
