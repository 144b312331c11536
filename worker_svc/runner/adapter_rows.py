"""The adapters of a step's rows: which tokens each has, and where on a device it lies."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from worker_svc.adapters.weights import AdapterRows, LoadedAdapter
from worker_svc.device.transfer import upload
from worker_svc.runner.batch_state import HostSlots, Staged
from worker_svc.runner.rows import Rows, runs

if TYPE_CHECKING:
    from worker_svc.adapters.on_device import DeviceAdapters


def has_adapters(table: HostSlots, rows: Rows) -> bool:
    """True if a row of a step has an adapter."""
    return bool(table.columns["has_adapter"][rows.slots].any())


def rows_of(table: HostSlots, rows: Rows, device: torch.device) -> tuple[AdapterRows, ...]:
    """The tokens of each adapter of a step; empty, at the cost of one look, where there is none."""
    if not has_adapters(table, rows):
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


def bring_adapters(device: "DeviceAdapters", current: HostSlots, staged: Staged) -> None:
    """Has the adapters of a step's new sequences on the device, and notes their places.

    Those of the slots as they are stay as well: the step may yet leave no trace.
    """
    table, entering = staged.table, list[tuple[int, LoadedAdapter]]()
    for sequence in staged.step.new_sequences:
        occupant = table.occupants[sequence.slot]
        if occupant is not None and occupant.adapter is not None:
            entering.append((sequence.slot, occupant.adapter))
    if not entering:
        return
    in_use = {
        one.adapter.source.adapter_id
        for one in (*current.occupants, *table.occupants)
        if one is not None and one.adapter is not None
    }
    for slot, adapter in entering:
        table.columns["adapter_place"][slot] = 1 + device.bring(adapter, in_use)
