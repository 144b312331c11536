"""Random weights in place of a checkpoint's: a model of a shape, without its files.

Speed does not depend on what a model knows. Numbers are made on the device and follow from the
tensor's name: a tensor that every rank has whole is the same on all of them.
"""

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from worker_svc.models.linear import WeightRows
from worker_svc.models.stored.quantized import EMBEDDING, END, ShareOf, StoredPart, cut_of
from worker_svc.models.weights import Destination, Share
from worker_svc.quantization.scheme import PLAIN, Quantization, RankCut, UnsupportedQuantization

STANDARD_DEVIATION = 0.02


def fill(
    destinations: Mapping[str, Destination],
    quantization: Quantization | None,
    share: ShareOf,
    dtype: torch.dtype,
    device: torch.device,
    embedding: str = EMBEDDING,
) -> None:
    """Fills all destinations: norms with 1, biases with 0, others with normal numbers.

    Raises UnsupportedQuantization for a format whose numbers are stored in fewer bits; plain
    weights are rounded as those of a checkpoint would be.
    """
    for name, destination in destinations.items():
        values = _values(name, destination.shape, share(name), dtype, device)
        is_linear = isinstance(destination, WeightRows) and name != embedding
        if quantization is None or not is_linear:
            destination.copy_(values)
        else:
            assert isinstance(destination, WeightRows)
            _round(name.removesuffix(END), destination, values, quantization, share(name))


def _values(
    name: str,
    shape: tuple[int, ...],
    share: Share | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    if name.endswith(".bias"):
        return torch.zeros(shape, dtype=dtype, device=device)
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype, device=device)
    part = 0 if share is None else share.index
    seed = zlib.crc32(f"{name}/{part}".encode())
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.empty(shape, dtype=dtype, device=device)
    return values.normal_(0.0, STANDARD_DEVIATION, generator=generator)


def _round(
    name: str,
    rows: WeightRows,
    values: Tensor,
    quantization: Quantization,
    share: Share | None,
) -> None:
    """Fills rows with a weight as the scheme rounds it."""
    scheme = quantization.scheme(name)
    whole = cut_of(rows.shape, share)
    if scheme is not PLAIN and set(scheme.tensors(*whole.whole)) != {"weight"}:
        raise UnsupportedQuantization(
            f"load_format: dummy makes float numbers, and {quantization.label} stores others; "
            "--quantization rounds them"
        )
    own = RankCut(rows.shape, whole.outputs, whole.inputs)
    part = StoredPart(name, rows, scheme, own)
    part.put(scheme.read({"weight": values}, own), values.device)
