"""The tokens of a step, by their adapter."""

import numpy as np
import torch

from worker_svc.adapters.weights import AdapterRows, LoadedAdapter
from worker_svc.device.transfer import upload
from worker_svc.runner.batch_state import HostSlots
from worker_svc.runner.rows import Rows, runs


def rows_of(table: HostSlots, rows: Rows, device: torch.device) -> tuple[AdapterRows, ...]:
    """The tokens of each adapter of a step; empty, at the cost of one look, where there is none."""
    if not table.columns["has_adapter"][rows.slots].any():
        return ()
    found: dict[str, tuple[LoadedAdapter, list[int]]] = {}
    for row, slot in enumerate(rows.slots.tolist()):
        occupant = table.occupants[slot]
        if occupant is not None and (adapter := occupant.adapter) is not None:
            found.setdefault(adapter.source.adapter_id, (adapter, []))[1].append(row)
    if len(found) == 1:
        ((adapter, its_rows),) = found.values()
        if len(its_rows) == len(rows.slots):
            return (AdapterRows(adapter, None),)
    firsts = np.cumsum(rows.num_scheduled) - rows.num_scheduled
    tokens = [runs(firsts[its], rows.num_scheduled[its]) for _, its in found.values()]
    adapters = [adapter for adapter, _ in found.values()]
    return tuple(map(AdapterRows, adapters, upload(device, *tokens)))
