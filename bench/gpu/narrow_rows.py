"""Times a layer's products of few rows with weights in 4 and 8 bits, each alone and all in turn.

    python -m bench.gpu.narrow_rows --shape qwen3-8b --rows 1 8

Random weights of a real shape for several layers, so that none is still in a cache, the products in
a CUDA graph, one after the other as in a step. `bytes` is what the weights of a layer take with
their scales, and what their time would be at a rate that memory reaches.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu.gemms import kinds
from bench.harness.checkpoints import SHAPES
from bench.harness.records import Results, add_json
from kernels.cluster import narrow_rows
from kernels.cluster.narrow_rows import NarrowRows
from kernels.quantized import rounding
from kernels.quantized.narrow import NarrowWeight
from kernels.quantized.scaled import ScaledWeight
from worker_svc.device.capture_stream import captured, capturing
from worker_svc.tuning.stopwatch import least_us

NUM_LAYERS = 6
REPLAYS = 5
RATE = 4.27e12  # bytes a second
EPS = 1e-6
ROUNDED: dict[str, Callable[[Tensor], NarrowWeight | None]] = {
    "fp8": lambda w: NarrowWeight.of(ScaledWeight.rounded(w)),
    "int4 by 128": lambda w: NarrowWeight.of(rounding.quantized(w, 4, 128)),
    "int4 by 32": lambda w: NarrowWeight.of(rounding.quantized(w, 4, 32)),
    "int8 by 32": lambda w: NarrowWeight.of(rounding.quantized(w, 8, 32)),
}


@dataclass(frozen=True, slots=True)
class Weights:
    """A product's weights of all layers, and their kernels."""

    kernels: NarrowRows
    by_layer: Sequence[NarrowWeight]

    @classmethod
    def of(cls, size: tuple[int, int], kind: str) -> "Weights":
        """Random ones [N, K]. Raises RuntimeError if they have no kernel."""
        weights = []
        for _ in range(NUM_LAYERS):
            narrow = ROUNDED[kind](torch.randn(size, device="cuda") * 0.02)
            found = None if narrow is None else narrow_rows.kernels_for(narrow, torch.bfloat16)
            if found is None:
                raise RuntimeError(f"no kernel for {kind} and {list(size)} on this device")
            kernels, weight = found
            weights.append(weight)
        return cls(kernels, weights)


@dataclass(frozen=True, slots=True)
class Product:
    """A product of a layer, as a step has it."""

    weights: Weights
    x: Tensor
    residual: Tensor | None
    norm: Tensor | None
    gated: bool

    @classmethod
    def of(cls, name: str, weights: Weights, rows: int) -> "Product":
        """One with random rows."""
        n, k = weights.by_layer[0].shape
        device, dtype = torch.device("cuda"), torch.bfloat16
        x = torch.randn((rows, k), device=device, dtype=dtype)
        adds = name in ("o", "down")
        residual = torch.randn((rows, n), device=device, dtype=dtype) if adds else None
        norm = None if adds else torch.rand(k, device=device, dtype=dtype) + 0.5
        return cls(weights, x, residual, norm, name == "gate_up")

    @property
    def nbytes(self) -> int:
        """Of one layer's weight."""
        return self.weights.by_layer[0].nbytes

    def run(self, layer: int) -> None:
        """The product of a layer."""
        self.weights.kernels.linear(
            self.x, self.weights.by_layer[layer], residual=self.residual, norm=self.norm, eps=EPS,
            gated=self.gated,
        )  # fmt: skip


@torch.inference_mode()
def layer_us(products: Sequence[Product]) -> float:
    """Microseconds of these products, one after the other, for one layer."""

    def layers() -> None:
        for layer in range(NUM_LAYERS):
            for product in products:
                product.run(layer)

    layers()  # loads kernels, outside of the capture
    with capturing(torch.device("cuda")):
        graph = captured(layers)

        def replays() -> None:
            for _ in range(REPLAYS):
                graph.replay()

        times = [least_us([replays], waits=True)[0] for _ in range(3)]
    return statistics.median(times) / (NUM_LAYERS * REPLAYS)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.narrow_rows", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--kinds", choices=ROUNDED, nargs="+", default=list(ROUNDED))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    add_json(parser)
    options = parser.parse_args(arguments)
    told = Results(options.json, ["python", "-m", "bench.gpu.narrow_rows", *arguments])
    sizes = {name: (kind.n, kind.k) for name, kind in kinds(SHAPES[options.shape], 1).items()}
    for kind in options.kinds:
        weights = {name: Weights.of(size, kind) for name, size in sizes.items()}
        for rows in options.rows:
            products = {name: Product.of(name, each, rows) for name, each in weights.items()}
            times = {name: layer_us([product]) for name, product in products.items()}
            times["all"] = layer_us(list(products.values()))
            nbytes = sum(product.nbytes for product in products.values())
            shown = ", ".join(f"{name} {us:.1f}" for name, us in times.items())
            told.say(
                f"{kind:12} {rows:3} rows: {shown} us; {nbytes / 2**20:.1f} MiB, "
                f"{1e6 * nbytes / RATE:.1f} us"
            )
            told.add(
                "narrow rows",
                {"shape": options.shape, "kind": kind, "rows": rows, "bytes": nbytes, **times},
            )


if __name__ == "__main__":
    main(sys.argv[1:])
