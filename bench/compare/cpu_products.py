"""CPU: the products of one step of a model, by the format of its weights. Needs a C compiler.

    python -m bench.compare.cpu_products [--rows 1 4 16 64] [--group 32] [--isa avx2]

A pass multiplies by every weight of the model once (the default model's shapes), so that a step's
bytes come from memory and not from a smaller cache than the step would have. One thread computes
and only its CPU time counts, so that other processes have little effect; the formats take turns,
pass by pass. The least and the median of their passes are printed, and the bytes of weights that
the least one read in a second.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from kernels.cpu import isa, library
from kernels.cpu.library import Library, PackedLinear
from kernels.quantized.grouped import GroupedWeight

# (outputs, inputs) of a layer of the default model, and of its head.
LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))
HEAD = (49152, 576)
NUM_LAYERS = 30
# Bits of a weight, 0: float numbers; whether rows are rounded to 8 bits.
FORMATS = {
    "float": (0, False),
    "8 bits": (8, False),
    "4 bits": (4, False),
    "8 by 8": (8, True),
    "4 by 8": (4, True),
}


@dataclass(frozen=True, slots=True)
class ProductTiming:
    """All products of a step, in one format; CPU time."""

    weights: str
    rows: int
    least_ms: float
    median_ms: float
    gbytes_per_s: float


def drawn(shape: tuple[int, int], bits: int, group: int) -> GroupedWeight:
    """Random integers with float16 scales and offsets, as in a Q4_1 or Q8_1 file."""
    integers = torch.randint(0, 2**bits, shape, dtype=torch.uint8)
    scales = (torch.rand((shape[0], shape[1] // group)) / 2**bits).half().float()
    return GroupedWeight(integers, scales, -scales * 2 ** (bits - 1), bits)


def packed(
    compiled: Library, shape: tuple[int, int], bits: int, group: int, rounds_rows: bool
) -> PackedLinear:
    """A random weight in the library's layout; no bits: float numbers."""
    if bits:
        weight = replace(drawn(shape, bits, group), rounds_rows=rounds_rows)
        return compiled.pack_groups(weight, None)
    return compiled.pack(torch.randn(shape).to(compiled.dtype), None)


class Step:
    """All products of one step."""

    def __init__(self, compiled: Library, bits: int, group: int, rounds_rows: bool) -> None:
        shapes = [*LAYER * NUM_LAYERS, HEAD]
        self._library = compiled
        self._weights = [packed(compiled, shape, bits, group, rounds_rows) for shape in shapes]
        self.num_bytes = sum(one.weight.nbytes for one in self._weights)

    def pass_ms(self, inputs: dict[int, Tensor], outputs: dict[int, Tensor]) -> float:
        began_s = time.thread_time()
        for weight in self._weights:
            x = inputs[weight.num_inputs]
            self._library.linear(x, weight, outputs[weight.num_outputs])
        return 1e3 * (time.thread_time() - began_s)


def measure(
    steps: dict[str, Step], dtype: torch.dtype, rows: int, rounds: int
) -> list[ProductTiming]:
    """Times all formats in turn."""
    inputs = {k: torch.randn(rows, k).to(dtype) for _, k in (*LAYER, HEAD)}
    outputs = {n: torch.empty((rows, n), dtype=dtype) for n, _ in (*LAYER, HEAD)}
    times_ms: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times_ms[name].append(step.pass_ms(inputs, outputs))
    return [
        ProductTiming(
            weights=name,
            rows=rows,
            least_ms=round(min(found), 2),
            median_ms=round(statistics.median(found), 2),
            gbytes_per_s=round(steps[name].num_bytes / min(found) / 1e6, 1),
        )
        for name, found in times_ms.items()
    ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--group", type=int, default=32, choices=library.GROUPS)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--isa", default="", help="instruction set; default: the fastest")
    parser.add_argument("--rounds", type=int, default=25, help="passes of each format")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints a table, then a JSON line for each of its rows."""
    options = parse(arguments)
    torch.set_num_threads(1)
    dtype: torch.dtype = getattr(torch, options.dtype)
    compiled = library.load(dtype, {**os.environ, isa.VARIABLE: options.isa})
    if compiled is None:
        raise SystemExit("no C kernels: a C compiler is needed")
    steps = {
        name: Step(compiled, bits, options.group, rounds_rows)
        for name, (bits, rounds_rows) in FORMATS.items()
    }
    print(f"{options.dtype}, {compiled.isa}, one thread, groups of {options.group}")
    print(f"{'weights':<10}{'rows':>6}{'MB':>8}{'least ms':>10}{'median ms':>11}{'GB/s':>7}")
    for rows in options.rows:
        for one in measure(steps, dtype, rows, options.rounds):
            megabytes = steps[one.weights].num_bytes / 1e6
            print(
                f"{one.weights:<10}{rows:>6}{megabytes:>8.1f}{one.least_ms:>10.2f}"
                f"{one.median_ms:>11.2f}{one.gbytes_per_s:>7.1f}"
            )
            facts = {"dtype": options.dtype, "isa": compiled.isa, "group": options.group}
            print(json.dumps({"benchmark": "cpu_products", **asdict(one), **facts}))


if __name__ == "__main__":
    main()
