"""Tensors of a checkpoint by name, whichever file they are in."""

from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from worker_svc.models.stored.weight_files import MissingWeight, WeightError, WeightFiles
from worker_svc.models.weights import WrongShape
from worker_svc.quantization.scheme import DamagedWeight, RankCut, TensorSpec


class WrongValues(WeightError):
    """A tensor has a type or values that it cannot have."""


class Checkpoint:
    """All files of a folder, open while it is entered. Errors name the tensor."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = ExitStack()
        self._by_name: dict[str, Any] = {}

    def __enter__(self) -> "Checkpoint":
        with self._files:
            files = WeightFiles(self._folder)
            for path in files.paths:
                file = self._files.enter_context(files.open(path))
                self._by_name.update(dict.fromkeys(file.names, file.tensors))
            self._files = self._files.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._by_name.clear()
        self._files.close()

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._by_name.keys()

    def stored(self, name: str) -> Any:
        """A tensor that is read where it is indexed, with its shape."""
        return self._by_name[name].get_slice(name)

    def whole(self, name: str) -> Tensor:
        """A tensor as it is stored."""
        tensor: Tensor = self._by_name[name].get_tensor(name)
        return tensor

    def part(self, name: str, spec: TensorSpec, cut: RankCut, matrix: int | None = None) -> Tensor:
        """The part of a tensor that a rank reads. Raises WeightError if it is not as specified.

        `matrix` is the only one to be read of a tensor [count, N, K].
        """
        if name not in self._by_name:
            raise MissingWeight(f"{name}: not found in {self._folder}")
        stored = self.stored(name)
        found = tuple(stored.get_shape())
        if found != spec.shape and not (found == () and spec.shape == (1,)):
            raise WrongShape(f"{name}: has shape {found}, expected {spec.shape}")
        tensor = self._cut(name, stored, spec, cut, matrix)
        if tensor.dtype not in spec.dtypes:
            wanted = " or ".join(map(_short, spec.dtypes))
            raise WrongValues(f"{name}: has type {_short(tensor.dtype)}, expected {wanted}")
        if spec.is_scale and not bool((torch.isfinite(tensor) & (tensor > 0)).all()):
            raise WrongValues(f"{name}: has a scale that is not finite and above zero")
        return tensor

    def _cut(
        self, name: str, stored: Any, spec: TensorSpec, cut: RankCut, matrix: int | None
    ) -> Tensor:
        slices = [slice(None)] * len(spec.shape)
        if matrix is not None:
            slices[0] = slice(matrix, matrix + 1)
        parts = zip((spec.outputs, spec.inputs), (cut.outputs, cut.inputs), cut.whole, strict=True)
        for axis, part, whole in parts:
            if axis is None or len(part) == whole:
                continue
            try:
                slices[axis.dim] = axis.cut(part, whole)
            except DamagedWeight as error:
                raise WrongShape(f"{name}: {error}") from None
        if all(each == slice(None) for each in slices):
            return self.whole(name).reshape(spec.shape)
        tensor: Tensor = stored[tuple(slices)]
        return tensor if matrix is None else tensor[0]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
