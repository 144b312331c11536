"""Chooses the library's fastest GEMM algorithm for each number of rows.

torch takes the first algorithm of the library's heuristic. For many numbers of rows another one is
faster, by up to a third. Rank 0's times decide for all ranks. The choices are stored, so that the
next start rounds in the same way and need not measure. Independent of the device and of how GEMMs
are timed.
"""

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kernels.gemm.cublas_lt import CublasError, GemmKind, GemmShape, LibraryGemm
from worker_svc.models.gemm_choices import Choices, GemmChoice
from worker_svc.parallel.group import Group
from worker_svc.tuning.gemm_cache import GemmCache, dump, load
from worker_svc.tuning.stopwatch import vote

log = logging.getLogger(__name__)

# Smaller differences are noise.
WORTHWHILE = 0.02
# Elements. Smaller weights are read in a few microseconds with any algorithm.
SMALLEST_WEIGHT = 1 << 24


@dataclass(frozen=True, slots=True)
class Timing:
    """Measured time of a GEMM with an algorithm; None is torch's choice."""

    algorithm: bytes | None
    us: float


Measure = Callable[[GemmShape], Sequence[Timing]]  # torch's time comes first
ByRows = dict[int, LibraryGemm]


class GemmLibrary(Protocol):
    """The part of `CublasLt` that the choice needs."""

    def gemm(self, shape: GemmShape, algorithm: bytes) -> LibraryGemm:
        """Returns a GEMM by this algorithm. Raises CublasError if the library rejects it."""


def shapes(
    kinds: Iterable[GemmKind],
    row_counts: Iterable[int],
    is_librarys: Callable[[int, GemmKind], bool],
) -> list[GemmShape]:
    """GEMM shapes worth tuning, in descending order of rows."""
    large = [kind for kind in kinds if kind.n * kind.k >= SMALLEST_WEIGHT]
    counts = sorted(set(row_counts), reverse=True)
    return [GemmShape(rows, kind) for rows in counts for kind in large if is_librarys(rows, kind)]


def choose(
    wanted: Sequence[GemmShape],
    library: GemmLibrary,
    cache: GemmCache,
    measure: Measure,
    group: Group,
) -> Choices:
    """Chooses algorithms; a collective, to be called with equal shapes on all ranks.

    Stored choices that still work are used; other shapes are measured and stored.
    """
    told = group.of_first(lambda: json.dumps(dump(_decide(wanted, library, cache, measure))))
    choices = load(json.loads(told))
    log.info("GEMMs: %s", summary(choices))
    return choices


def by_kind(choices: Choices, library: GemmLibrary, group: Group) -> dict[GemmKind, ByRows]:
    """GEMMs that are faster than torch's, by kind and number of rows; a collective."""
    return group.together(lambda: _by_kind(choices, library))


def quickest(timings: Sequence[Timing]) -> GemmChoice:
    """The fastest algorithm; torch's unless another is faster by more than `WORTHWHILE`."""
    torchs = timings[0]
    offered = [torchs, min(timings, key=lambda timing: timing.us)]
    best = offered[vote([timing.us for timing in offered], WORTHWHILE)]
    return GemmChoice(best.algorithm, best.us, torchs.us)


def summary(choices: Choices) -> str:
    """Number of shapes with another algorithm than torch's, and the time saved, as text."""
    changed = [choice for choice in choices.values() if choice.algorithm is not None]
    before, after = sum(one.torch_us for one in changed), sum(one.us for one in changed)
    gain = f", which take {after:.0f} us in place of {before:.0f}" if changed else ""
    return f"{len(changed)} of {len(choices)} shapes by another algorithm than torch's{gain}"


def _decide(
    wanted: Sequence[GemmShape], library: GemmLibrary, cache: GemmCache, measure: Measure
) -> Choices:
    known = cache.read()
    choices = {
        shape: known[shape]
        for shape in wanted
        if shape in known and _serves(library, shape, known[shape])
    }
    missing = [shape for shape in wanted if shape not in choices]
    measured = {shape: quickest(measure(shape)) for shape in missing}
    if measured:
        cache.add(measured)
    return choices | measured


def _serves(library: GemmLibrary, shape: GemmShape, choice: GemmChoice) -> bool:
    try:
        return choice.algorithm is None or bool(library.gemm(shape, choice.algorithm))
    except CublasError as error:
        log.warning("GEMMs: a remembered algorithm is left out: %s", error)
        return False


def _by_kind(choices: Choices, library: GemmLibrary) -> dict[GemmKind, ByRows]:
    chosen: dict[GemmKind, ByRows] = {}
    for shape, choice in choices.items():
        if choice.algorithm is not None:
            gemm = library.gemm(shape, choice.algorithm)
            chosen.setdefault(shape.kind, {})[shape.rows] = gemm
    return chosen
