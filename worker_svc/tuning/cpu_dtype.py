"""Chooses the dtype of weights on this CPU by timing GEMMs once per machine.

Times GEMMs of the model's shapes for decode steps and for a prompt, with more weights than CPU
caches hold; a dtype that is fastest for few rows can be far slower for many, and then loses. One
thread computes, and only its CPU time counts, so that other processes have little effect.
Arithmetic is in float32 for all dtypes. float16 is no candidate: it was as slow as bfloat16
wherever measured, and a bfloat16 checkpoint can exceed its range.
"""

import contextlib
import hashlib
import json
import logging
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernels.cpu import build, isa, library
from kernels.cpu.library import Library
from worker_svc.models.cpu_weights import activation_dtype
from worker_svc.models.linear import Linear
from worker_svc.models.spec import ModelSpec

CANDIDATES = (torch.bfloat16, torch.float32)  # the first is preferred
ROUNDS = {1: 5, 8: 5, 64: 3}  # number of rows -> rounds
CLEARLY = 0.9  # of the first candidate's time
WORKING_SET = 1 << 24  # elements of the weights

Multiply = Callable[[Tensor], Tensor]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WeightShapes:
    """Weight shapes [N, K] of a layer, and the number of layers."""

    shapes: tuple[tuple[int, int], ...]
    num_layers: int

    @classmethod
    def of(cls, spec: ModelSpec) -> "WeightShapes":
        """The weight shapes of a model."""
        hidden, inner = spec.hidden_size, spec.uniform_feed.intermediate_size
        q = spec.attention.num_heads * spec.attention.head_dim
        kv = spec.attention.num_kv_heads * spec.attention.head_dim
        shapes = ((q + 2 * kv, hidden), (hidden, q), (2 * inner, hidden), (hidden, inner))
        return cls(shapes, spec.num_layers)

    @property
    def num_copies(self) -> int:
        """Number of layers with more weights than a CPU cache holds, at most the model's."""
        size = sum(n * k for n, k in self.shapes)
        return min(self.num_layers, -(-WORKING_SET // size))


def quickest(shapes: WeightShapes, environment: Mapping[str, str] | None = None) -> torch.dtype:
    """The fastest dtype for these weight shapes; stored, so all starts on a machine agree."""
    environment = os.environ if environment is None else environment
    key = _key(shapes, environment)
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    path = build.cache_folder(environment) / f"dtype-{digest}.json"
    times_ms = _remembered(path, key)
    if times_ms is None:
        times_ms = _measure(shapes, environment)
        _remember(path, key, times_ms)
    dtype = choose(times_ms)
    told = ", ".join(f"{_name(one)} {times_ms[one]:.2f} ms" for one in CANDIDATES)
    log.info("dtype %s: GEMMs take, on average, %s", _name(dtype), told)
    return dtype


def choose(times_ms: Mapping[torch.dtype, float]) -> torch.dtype:
    """The first candidate, unless another is faster by more than 1 - CLEARLY."""
    best = min(CANDIDATES, key=lambda dtype: times_ms[dtype])
    return best if times_ms[best] < CLEARLY * times_ms[CANDIDATES[0]] else CANDIDATES[0]


def _measure(shapes: WeightShapes, environment: Mapping[str, str]) -> dict[torch.dtype, float]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            return {dtype: _time_ms(shapes, dtype, environment) for dtype in CANDIDATES}
    finally:
        torch.set_num_threads(num_threads)


def _time_ms(shapes: WeightShapes, dtype: torch.dtype, environment: Mapping[str, str]) -> float:
    gemms = _gemms(shapes, dtype, library.load(dtype, environment))
    return statistics.geometric_mean(_pass_ms(gemms, dtype, rows) for rows in ROUNDS)


def _gemms(
    shapes: WeightShapes, dtype: torch.dtype, compiled: Library | None
) -> list[tuple[Multiply, int]]:
    """All GEMMs of a forward pass, each with its K, as the model would compute them."""
    gemms: list[tuple[Multiply, int]] = []
    for _ in range(shapes.num_copies):
        for n, k in shapes.shapes:
            weight = torch.full((n, k), 0.5, dtype=dtype)
            gemms.append((_multiply(weight, compiled), k))
    return gemms


def _multiply(weight: Tensor, compiled: Library | None) -> Multiply:
    if compiled is None:
        linear = Linear(weight)
        linear.pack()
        return linear
    packed = compiled.pack(weight, None)
    return lambda x: compiled.linear(x, packed, x.new_empty((len(x), packed.num_outputs)))


def _pass_ms(gemms: Sequence[tuple[Multiply, int]], dtype: torch.dtype, rows: int) -> float:
    inputs = {k: torch.full((rows, k), 0.5, dtype=dtype) for _, k in gemms}
    taken_s = []
    for _ in range(ROUNDS[rows]):
        began_s = time.thread_time()
        for multiply, k in gemms:
            multiply(inputs[k])
        taken_s.append(time.thread_time() - began_s)
    return 1e3 * min(taken_s)


def _key(shapes: WeightShapes, environment: Mapping[str, str]) -> str:
    """A text of everything known to affect the times."""
    facts = (
        shapes,
        [one.name for one in isa.candidates(environment)],
        environment.get("PAGEWIRE_CPU_KERNELS"),
        build.can_compile(environment),
        platform.machine(),
        sorted(isa.cpu_features()),
        torch.__version__,
        [activation_dtype(dtype, torch.device("cpu")) for dtype in CANDIDATES],
    )
    return repr(facts)


def _remembered(path: Path, key: str) -> dict[torch.dtype, float] | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(path.read_text("utf-8"))
        if found["key"] == key:
            return {dtype: float(found["ms"][_name(dtype)]) for dtype in CANDIDATES}
    return None


def _remember(path: Path, key: str, times_ms: Mapping[torch.dtype, float]) -> None:
    """Stores the times; without a writable folder the next start measures again."""
    text = json.dumps({"key": key, "ms": {_name(one): ms for one, ms in times_ms.items()}})
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=".dtype-", delete=False
        ) as file:
            file.write(text)
        os.replace(file.name, path)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
