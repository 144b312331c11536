"""Preparations before torch is loaded: only with a GPU, and errors are ignored."""

import threading

import pytest

from tests.pace import patience
from worker_svc.config import WorkerConfig
from worker_svc.device.gpu_facts import Gpu
from worker_svc.startup import preload

H200 = Gpu("NVIDIA H200", 90)


class Driver:
    """The called part of libcuda, with a given result of cuInit."""

    def __init__(self, result: int) -> None:
        self._result = result
        self.calls: list[tuple[str, int]] = []

    def cuInit(self, flags: int) -> int:
        self.calls.append(("cuInit", flags))
        return self._result

    def cuDevicePrimaryCtxRetain(self, context: object, device: int) -> int:
        self.calls.append(("cuDevicePrimaryCtxRetain", device))
        return 0


@pytest.mark.parametrize(
    ("result", "calls"),
    [(0, [("cuInit", 0), ("cuDevicePrimaryCtxRetain", 3)]), (100, [("cuInit", 0)])],
    ids=["a device", "no device"],
)
def test_a_rank_opens_its_own_device_if_there_is_one(monkeypatch, result, calls):
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    driver = Driver(result)
    preload.open_device(driver, device=3)
    assert driver.calls == calls


@pytest.mark.parametrize(
    ("device", "found", "begins"),
    [("cpu", (H200,), False), ("auto", (), False), ("auto", (H200,), True)],
)
def test_nothing_is_begun_for_the_cpu_or_without_a_gpu(monkeypatch, device, found, begins):
    begun = threading.Event()
    monkeypatch.setattr(preload, "gpus", lambda: found)
    monkeypatch.setattr(preload, "_run", lambda rank: begun.set())
    preload.begin(WorkerConfig(device=device))
    assert begun.wait(patience(5) if begins else 0.05) is begins
