"""Loads the weights of a GGUF file: integers as they are stored, or as float numbers.

One tensor is in memory at a time in addition to what the model holds, and of a tensor that becomes
float numbers only some rows.
"""

import logging
from pathlib import Path

import torch
from torch import Tensor

from kernels.quantized.grouped import GroupedWeight
from pagewire.gguf.blocks import StoredTensor
from pagewire.gguf.header import read_header
from pagewire.gguf.stored import stored_weights
from worker_svc.models.experts import Joined
from worker_svc.models.linear import WeightRows
from worker_svc.models.mxfp4_experts import CodeRows
from worker_svc.models.stored.quantized import EMBEDDING
from worker_svc.models.weights import Destination, Filling, IntegerDestination, Share

MIB = 1 << 20

log = logging.getLogger(__name__)


def load_gguf(path: Path, filling: Filling, device: torch.device, keeps_integers: bool) -> None:
    """Fills every destination, with float numbers or, where integers are kept, with these.

    Raises WeightError, or BadGguf.
    """
    log.info("reading weights: %s", path.name)
    kept_bytes = widened_bytes = 0
    for name, stored in stored_weights(read_header(path)).items():
        if filling.ignores(name):
            continue
        destination, share = filling.claim(name, stored.tensor.shape)
        is_table = name == EMBEDDING and device.type != "cpu"  # of which CUDA reads rows
        if isinstance(destination, CodeRows):
            kept_bytes += _put_codes(stored, destination, share)
        elif keeps_integers and not is_table and _takes(destination, stored, share):
            num_bytes = _put(stored, destination, share, device)
            if isinstance(destination, WeightRows) and destination.linear.is_wide:
                widened_bytes += destination.values.nbytes
            else:
                kept_bytes += num_bytes
        else:
            widened_bytes += _copy(stored, destination, share)
    filling.finish(path)
    kept_mib, widened_mib = kept_bytes // MIB, widened_bytes // MIB
    log.info("weights: %d MiB stay integers, %d MiB are float numbers", kept_mib, widened_mib)


def _takes(destination: Destination, stored: StoredTensor, share: Share | None) -> bool:
    """True if integers can be put there: a rank's columns must be whole groups."""
    if stored.bits is None or not isinstance(destination, IntegerDestination):
        return False
    if isinstance(destination, Joined) and destination.is_wide:
        return False
    if share is None or share.sections:
        return share is None
    return share.dim == 0 or destination.shape[1] % stored.group == 0


def _put(
    stored: StoredTensor, destination: Destination, share: Share | None, device: torch.device
) -> int:
    """Fills a destination with integers; returns their bytes."""
    groups = stored.groups()
    integers, scales, offsets = (
        torch.from_numpy(part) for part in (groups.integers, groups.scales, groups.offsets)
    )
    weight = GroupedWeight(integers, scales, offsets, groups.bits)
    part = weight if share is None else share.cut_groups(weight)
    assert isinstance(destination, IntegerDestination)
    destination.put_narrow(part.to(device))
    return part.integers.nbytes * part.bits // 8 + part.scales.nbytes + part.offsets.nbytes


def _put_codes(stored: StoredTensor, destination: CodeRows, share: Share | None) -> int:
    """Fills a destination with codes in MXFP4; returns their bytes, with those of exponents."""
    own = (destination.codes, destination.exponents)
    parts = []
    for whole, part in zip(map(torch.from_numpy, stored.codes()), own, strict=True):
        # A rank's part of an expert is of whole blocks.
        parts.append(whole if share is None else share.cut(whole, part.shape[share.dim]))
    destination.put_codes(*parts)
    return sum(part.nbytes for part in own)


def _copy(stored: StoredTensor, destination: Destination, share: Share | None) -> int:
    """Writes a tensor, or its share, as float numbers; returns their bytes."""
    values = destination.values if isinstance(destination, WeightRows) else destination
    if not isinstance(values, Tensor) or (share is not None and share.sections):
        whole = torch.from_numpy(stored.dense())
        part = whole if share is None else share.cut(whole, destination.shape[share.dim])
        destination.copy_(part)
        return part.nbytes
    values = values if values.ndim == 1 else values.view(-1, values.shape[-1])
    if values.ndim == 1:
        whole = torch.from_numpy(stored.dense())
        values.copy_(whole if share is None else share.cut(whole, len(values)))
        return values.nbytes
    starts = [0, 0]
    if share is not None:
        starts[share.dim] = share.index * values.shape[share.dim]
    num_rows, num_columns = values.shape
    columns = slice(starts[1], starts[1] + num_columns)
    filled = 0
    for chunk in stored.rows(starts[0], starts[0] + num_rows):
        values[filled : filled + len(chunk)].copy_(torch.from_numpy(chunk[:, columns]))
        filled += len(chunk)
    return values.nbytes
