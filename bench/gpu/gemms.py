"""Times a layer's GEMMs with all algorithms that the worker tries, and with torch's own choice.

    python -m bench.gpu.gemms --shape qwen3-8b

Random weights of a real shape, each GEMM in a CUDA graph as the worker measures it at its start; an
algorithm that saves no significant part of torch's time is reported as torch's.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence

import torch

from bench.harness.checkpoints import SHAPES, CheckpointShape
from bench.harness.records import Results, add_json
from kernels.gemm import cublas_lt
from kernels.gemm.cublas_lt import GemmKind, GemmShape
from worker_svc.models.fused_gemms import is_librarys
from worker_svc.runner.graphs.decode_graphs import batch_sizes
from worker_svc.tuning.gemm_choice import quickest
from worker_svc.tuning.gemm_timing import GemmTimer

DTYPE = torch.bfloat16
NUM_LAYERS = 8  # weights to rotate through


def kinds(shape: CheckpointShape, size: int) -> dict[str, GemmKind]:
    """A layer's GEMMs by name, as one of `size` ranks has them."""
    heads, kv_heads = shape.num_heads // size, max(1, shape.num_kv_heads // size)
    hidden, inner, is_alone = shape.hidden_size, shape.intermediate_size // size, size == 1
    qkv = (heads + 2 * kv_heads) * shape.head_dim
    return {
        "qkv": GemmKind(qkv, hidden, DTYPE, adds=False),
        "o": GemmKind(hidden, heads * shape.head_dim, DTYPE, adds=is_alone),
        "gate_up": GemmKind(2 * inner, hidden, DTYPE, adds=False),
        "down": GemmKind(hidden, inner, DTYPE, adds=is_alone),
    }


def measure(kind: GemmKind, row_counts: Sequence[int]) -> Iterator[dict[str, float]]:
    """Microseconds of torch and of the fastest algorithm, and the time taken to find it."""
    device = torch.device("cuda")
    library = cublas_lt.open_on(device)
    if library is None:
        raise RuntimeError("torch has loaded no cuBLASLt")
    size = (NUM_LAYERS, kind.n, kind.k)
    weights = torch.empty(size, dtype=DTYPE, device=device).normal_(std=0.02).unbind()
    timer = GemmTimer(library, {kind: weights}, device)
    for rows in row_counts:
        if not is_librarys(rows, kind):
            continue
        started = time.perf_counter()
        timings = timer.measure(GemmShape(rows, kind))
        spent_ms = 1e3 * (time.perf_counter() - started)
        choice = quickest(timings)
        yield {
            "rows": rows,
            "torch_us": choice.torch_us,
            "us": choice.us,
            "num_algorithms": len(timings) - 1,
            "measuring_ms": spent_ms,
        }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.gemms", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[*batch_sizes(256), 8192])
    add_json(parser)
    options = parser.parse_args(arguments)
    told = Results(options.json, ["python", "-m", "bench.gpu.gemms", *arguments])
    for name, kind in kinds(SHAPES[options.shape], options.tensor_parallel_size).items():
        found = list(measure(kind, options.rows))
        for one in found:
            told.say(
                f"{name:8} {one['rows']:5} rows: torch {one['torch_us']:8.1f} us, quickest of "
                f"{one['num_algorithms']} {one['us']:8.1f} us"
            )
            told.add("gemms", {"shape": options.shape, "gemm": name, **one})
        sums = [sum(one[key] for one in found) for key in ("torch_us", "us", "measuring_ms")]
        told.say(
            f"{name} [{kind.n}, {kind.k}], {len(found)} row counts: torch {sums[0]:.0f} us, "
            f"chosen {sums[1]:.0f} us, measured in {sums[2]:.0f} ms"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
