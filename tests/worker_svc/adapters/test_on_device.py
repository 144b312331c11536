"""Places of adapters on a device: who leaves, what lies there, and what a failed copy leaves."""

import importlib.util

import pytest
import torch
from torch import Tensor

from wire.adapters import AdapterSource
from worker_svc.adapters.packing import PackedLayout
from worker_svc.adapters.sites import AdapterTarget, LinearPart, Site
from worker_svc.adapters.weights import (
    Expansion,
    LoadedAdapter,
    PackedAdapter,
    PlainProduct,
    SiteWeights,
)

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)

from worker_svc.adapters.on_device import DeviceAdapters

CPU = torch.device("cpu")
QKV, DOWN = Site(0, LinearPart.QKV), Site(0, LinearPart.DOWN)
TARGETS = {
    "q": AdapterTarget(QKV, 0, 6, 4, None),
    "v": AdapterTarget(QKV, 8, 10, 4, None),  # outputs 6 and 7 are of no module that takes one
    "down": AdapterTarget(DOWN, 0, 4, 5, None),
}


def layout(norms: dict[Site, Tensor] | None = None) -> PackedLayout:
    return PackedLayout(TARGETS, norms or {}, torch.float32, pins=False)


def numbered(*shape: int) -> Tensor:
    size = torch.Size(shape).numel()
    return torch.arange(1.0, 1 + size).view(shape)


def weights(rank: int) -> dict[Site, SiteWeights]:
    """An adapter of v alone."""
    expansion = Expansion(8, 10, 0, rank, PlainProduct(numbered(2, rank)))
    return {QKV: SiteWeights(PlainProduct(numbered(rank, 4)), (expansion,))}


def loaded(name: str, rank: int = 3) -> LoadedAdapter:
    source = AdapterSource(name, f"/{name}", name)
    return LoadedAdapter(source, rank, {}, layout().packed(weights(rank)))


def test_an_adapter_lies_as_its_layers_with_zeros_for_what_it_lacks() -> None:
    packed = layout().packed(weights(17))
    stride = 32
    assert packed.ranks.tolist() == [stride, 17, 0]
    assert len(packed.values) == stride * (2 * 4 + 10 + 5 + 4)
    a_end, b_end = stride * 2 * 4, stride * (2 * 4 + 10)
    a = packed.values[:a_end].view(2, stride, 4)
    b = packed.values[a_end:b_end].view(10, stride)
    assert torch.equal(a[1, :17], numbered(17, 4))
    assert torch.equal(b[8:, :17], numbered(2, 17))
    a[1, :17] = b[8:, :17] = 0
    assert not packed.values.any()


def test_the_norm_before_a_layer_is_in_its_a() -> None:
    norm = torch.tensor([1.0, 2.0, 0.5, -1.0])
    packed = layout({QKV: norm}).packed(weights(3))
    assert torch.equal(packed.values[16 * 4 :][: 3 * 4].view(3, 4), numbered(3, 4) * norm)


def test_the_one_used_longest_ago_leaves_unless_a_sequence_has_it() -> None:
    device = DeviceAdapters(layout(), 3, 16, CPU)
    assert [device.bring(loaded(name), ()) for name in "abc"] == [0, 1, 2]
    assert device.bring(loaded("a"), ()) == 0  # used again
    assert device.bring(loaded("d"), {"b"}) == 2
    assert device.bring(loaded("b"), ()) == 1  # it stayed
    assert device.bring(loaded("c"), ()) == 0
    with pytest.raises(RuntimeError, match="all 3 places of adapters are in use"):
        device.bring(loaded("e"), {"b", "c", "d"})
    assert device.bring(loaded("b"), ()) == 1


def test_a_copy_that_fails_leaves_no_adapter_and_no_other_one_loses_its_place() -> None:
    device = DeviceAdapters(layout(), 2, 16, CPU)
    device.bring(loaded("a"), ())
    device.bring(loaded("b"), ())
    too_long = PackedAdapter(torch.zeros(10**4), torch.zeros(3, dtype=torch.int32))
    broken = LoadedAdapter(AdapterSource("c", "/c", "c"), 3, {}, too_long)
    with pytest.raises(RuntimeError):
        device.bring(broken, ())
    assert device.bring(loaded("d"), ()) == 0
    assert device.bring(loaded("b"), ()) == 1


def test_memory_is_that_of_the_largest_rank_in_every_place() -> None:
    device = DeviceAdapters(layout(), 5, 17, CPU)
    assert device.size_bytes == 5 * (32 * layout().values_per_rank + 3) * 4
