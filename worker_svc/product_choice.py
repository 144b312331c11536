"""Which of the library's algorithms multiplies: the quickest for each number of rows, as measured.

torch takes the first algorithm that the library's heuristic names. For many numbers of rows another
that it knows is quicker, by up to a third. Rank 0's clock decides for all ranks, and what it found
is remembered, so that the next start rounds as this one does and spends no time. Knows neither the
device nor how a product is timed.
"""

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kernels.cublas_lt import CublasError, LibraryProduct, ProductKind, ProductShape
from worker_svc.models.gemm_choices import Choices, GemmChoice
from worker_svc.parallel import Group
from worker_svc.product_memory import ProductMemory, dump, load

log = logging.getLogger(__name__)

# Less is the measurement's own scatter.
WORTHWHILE = 0.02
# Elements of a weight. Smaller ones are read in a few microseconds, whatever the algorithm.
SMALLEST_WEIGHT = 1 << 24


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a product takes by an algorithm; None: by the one that torch takes."""

    algorithm: bytes | None
    us: float


Measure = Callable[[ProductShape], Sequence[Timing]]  # torch's first
ByRows = dict[int, LibraryProduct]


class GemmLibrary(Protocol):
    """`CublasLt`, as far as choosing goes."""

    def product(self, shape: ProductShape, algorithm: bytes) -> LibraryProduct:
        """Raises CublasError for an algorithm that does not serve."""


def shapes(
    kinds: Iterable[ProductKind],
    row_counts: Iterable[int],
    is_librarys: Callable[[int, ProductKind], bool],
) -> list[ProductShape]:
    """The products for which choosing pays, those of the most rows first."""
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
    """Who multiplies; every rank has to ask, with the same shapes.

    What is remembered and still serves is taken; the rest is measured, and remembered.
    """
    told = group.of_first(lambda: json.dumps(dump(_decide(wanted, library, memory, measure))))
    choices = load(json.loads(told))
    log.info("products: %s", summary(choices))
    return choices


def by_kind(choices: Choices, library: GemmLibrary, group: Group) -> dict[ProductKind, ByRows]:
    """The products that are quicker than torch's; every rank has to ask."""
    return group.together(lambda: _by_kind(choices, library))


def quickest(timings: Sequence[Timing]) -> GemmChoice:
    """torch's, unless another is quicker by more than `WORTHWHILE`."""
    torchs = timings[0]
    best = min(timings, key=lambda timing: timing.us)
    if best.us >= torchs.us * (1 - WORTHWHILE):
        best = torchs
    return GemmChoice(best.algorithm, best.us, torchs.us)


def summary(choices: Choices) -> str:
    """What was changed and gained, in words."""
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
