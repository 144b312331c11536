"""Chooses the library's GEMM algorithms: the fastest for each number of rows.

torch takes the first algorithm of the library's heuristic. For many numbers of rows another is
faster, by up to a third. Rank 0's times decide for all ranks, and its choices are stored, so that
the next start rounds in the same way and spends no time. Knows neither the device nor how a GEMM is
timed.
"""

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kernels.gemm.cublas_lt import CublasError, LibraryProduct, ProductKind, ProductShape
from worker_svc.models.gemm_choices import Choices, GemmChoice
from worker_svc.parallel.group import Group
from worker_svc.tuning.gemm_cache import ProductMemory, dump, load

log = logging.getLogger(__name__)

# Smaller differences are noise.
WORTHWHILE = 0.02
# Elements of a weight. Smaller ones are read in a few microseconds, whatever the algorithm.
SMALLEST_WEIGHT = 1 << 24


@dataclass(frozen=True, slots=True)
class Timing:
    """Measured time of a GEMM with an algorithm; None: with torch's choice."""

    algorithm: bytes | None
    us: float


Measure = Callable[[ProductShape], Sequence[Timing]]  # torch's first
ByRows = dict[int, LibraryProduct]


class GemmLibrary(Protocol):
    """The part of `CublasLt` that choosing uses."""

    def product(self, shape: ProductShape, algorithm: bytes) -> LibraryProduct:
        """Raises CublasError for an algorithm that does not serve."""


def shapes(
    kinds: Iterable[ProductKind],
    row_counts: Iterable[int],
    is_librarys: Callable[[int, ProductKind], bool],
) -> list[ProductShape]:
    """The GEMM shapes for which choosing pays, those with the most rows first."""
    large = [kind for kind in kinds if kind.n * kind.k >= SMALLEST_WEIGHT]
    counts = sorted(set(row_counts), reverse=True)
    return [
        ProductShape(rows, kind) for rows in counts for kind in large if is_librarys(rows, kind)
    ]


def choose(
    wanted: Sequence[ProductShape],
    library: GemmLibrary,
    memory: ProductMemory,
    measure: Measure,
    group: Group,
) -> Choices:
    """Chooses algorithms; every rank must call it, with the same shapes.

    Stored choices that still work are used; the rest is measured and stored.
    """
    told = group.of_first(lambda: json.dumps(dump(_decide(wanted, library, memory, measure))))
    choices = load(json.loads(told))
    log.info("products: %s", summary(choices))
    return choices


def by_kind(choices: Choices, library: GemmLibrary, group: Group) -> dict[ProductKind, ByRows]:
    """The GEMMs that are faster than torch's; every rank must call it."""
    return group.together(lambda: _by_kind(choices, library))


def quickest(timings: Sequence[Timing]) -> GemmChoice:
    """torch's algorithm, unless another is faster by more than `WORTHWHILE`."""
    torchs = timings[0]
    best = min(timings, key=lambda timing: timing.us)
    if best.us >= torchs.us * (1 - WORTHWHILE):
        best = torchs
    return GemmChoice(best.algorithm, best.us, torchs.us)


def summary(choices: Choices) -> str:
    """The changed shapes and the gain, as text."""
    changed = [choice for choice in choices.values() if choice.algorithm is not None]
    before, after = sum(one.torch_us for one in changed), sum(one.us for one in changed)
    gain = f", which take {after:.0f} us in place of {before:.0f}" if changed else ""
    return f"{len(changed)} of {len(choices)} shapes by another algorithm than torch's{gain}"


def _decide(
    wanted: Sequence[ProductShape], library: GemmLibrary, memory: ProductMemory, measure: Measure
) -> Choices:
    known = memory.read()
    choices = {
        shape: known[shape]
        for shape in wanted
        if shape in known and _serves(library, shape, known[shape])
    }
    missing = [shape for shape in wanted if shape not in choices]
    measured = {shape: quickest(measure(shape)) for shape in missing}
    if measured:
        memory.add(measured)
    return choices | measured


def _serves(library: GemmLibrary, shape: ProductShape, choice: GemmChoice) -> bool:
    try:
        return choice.algorithm is None or bool(library.product(shape, choice.algorithm))
    except CublasError as error:
        log.warning("products: a remembered algorithm is left out: %s", error)
        return False


def _by_kind(choices: Choices, library: GemmLibrary) -> dict[ProductKind, ByRows]:
    chosen: dict[ProductKind, ByRows] = {}
    for shape, choice in choices.items():
        if choice.algorithm is not None:
            product = library.product(shape, choice.algorithm)
            chosen.setdefault(shape.kind, {})[shape.rows] = product
    return chosen
