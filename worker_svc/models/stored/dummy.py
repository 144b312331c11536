"""Random weights in place of a checkpoint's: a model of a shape, without its files.

Speed does not depend on what a model knows. Numbers are made on the device and follow from the
tensor's name: a tensor that every rank has whole is the same on all of them.
"""

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from worker_svc.models.experts import Listed
from worker_svc.models.interleaved import Interleaved
from worker_svc.models.linear import WeightRows
from worker_svc.models.mxfp4_experts import SCALES, Mxfp4Tensor
from worker_svc.models.stored.quantized import (
    EMBEDDING,
    END,
    ShareOf,
    StoredPart,
    cut_of,
    of_matrix,
)
from worker_svc.models.weights import Destination, Share
from worker_svc.quantization.scheme import PLAIN, Quantization, RankCut, UnsupportedQuantization

STANDARD_DEVIATION = 0.02
_SCALE = 127 - 7  # the exponent -7 of experts in MXFP4


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
        own = share(name)
        part = 0 if own is None else own.index
        if isinstance(destination, Mxfp4Tensor):
            destination.copy_(_codes(name, destination, device, part))
            continue
        numbers = values(name, destination.shape, dtype, device, part)
        layer = name.removesuffix(END)
        if quantization is None or name == embedding:
            destination.copy_(numbers)
        elif isinstance(destination, WeightRows | Interleaved):
            _round(layer, destination, numbers, quantization, own)
        elif isinstance(destination, Listed):
            for rows, of_one in zip(destination.parts, numbers, strict=True):
                _round(layer, rows, of_one, quantization, of_matrix(own))
        else:
            destination.copy_(numbers)


def values(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, part: int = 0
) -> Tensor:
    """The numbers of a tensor, or of the rank's part of it with this index."""
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=dtype, device=device)
    if len(shape) < 2:
        return torch.ones(shape, dtype=dtype, device=device)
    seed = zlib.crc32(f"{name}/{part}".encode())
    generator = torch.Generator(device).manual_seed(seed)
    numbers = torch.empty(shape, dtype=dtype, device=device)
    return numbers.normal_(0.0, STANDARD_DEVIATION, generator=generator)


def _codes(name: str, to: Mxfp4Tensor, device: torch.device, part: int) -> Tensor:
    """Codes of experts, all as likely, or the scale with which their deviation is about the same.

    The root of the mean square of the numbers of all codes is 2.9.
    """
    if to.ending == SCALES:
        return torch.full(to.shape, _SCALE, dtype=torch.uint8, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{name}/{part}".encode()))
    numbers = torch.empty(to.shape, dtype=torch.uint8, device=device)
    return numbers.random_(0, 256, generator=generator)


def _round(
    name: str,
    rows: WeightRows | Interleaved,
    numbers: Tensor,
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
    part.put(scheme.read({"weight": numbers}, own), numbers.device)
