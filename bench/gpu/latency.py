"""What it costs on a GPU to wait for other thread blocks, in microseconds.

    python -m bench.gpu.latency --json latency.jsonl

A layer of a small model is a chain of such waits, so these numbers say how short a decode step of
one row can be: a barrier of the whole grid through memory, a barrier of a cluster, an exchange of
values within a cluster through distributed shared memory, and the way from the end of a kernel to
what the next one does after its wait, in a CUDA graph, with programmatic dependent launch and
without. And how many clusters run at once, which the number of working multiprocessors of each
part of a chip decides. Needs compute capability 9 and `cuda.bindings`.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from bench.harness.records import Results, add_json
from kernels.cluster.program import Launch, Program
from worker_svc.device.capture_stream import captured, capturing
from worker_svc.tuning.stopwatch import least_us

SOURCE = Path(__file__).with_name("latency.cu")
REPEATS = 1000
CHAIN = 500
ROUNDS = 5


def median_us(work: Callable[[], object], times: int) -> float:
    """The median over rounds of the device's time for `work`, divided by `times`."""
    return statistics.median(least_us([work], waits=True)[0] / times for _ in range(ROUNDS))


def barriers(program: Program) -> dict[str, float]:
    """Barriers of a grid and of clusters, and exchanges within clusters."""
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    out = torch.zeros(1024, device="cuda")
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    grid = program.kernel("grid_barriers", Launch(blocks, 1, 128))

    def all_blocks() -> None:
        counter.zero_()
        grid(counter, REPEATS)

    found = {f"barrier of {blocks} blocks": median_us(all_blocks, REPEATS)}
    for size in (2, 4, 8, 16):
        launch = Launch(size * 7, size, 512)
        barrier = program.kernel("cluster_barriers", launch)
        exchange = program.kernel("cluster_exchanges", launch)
        wait, send = partial(barrier, out, REPEATS), partial(exchange, out, REPEATS, size)
        found[f"barrier of a cluster of {size}"] = median_us(wait, REPEATS)
        found[f"exchange in a cluster of {size}"] = median_us(send, REPEATS)
    return found


def kernel_to_kernel(program: Program) -> dict[str, float]:
    """From kernel to kernel of a graph."""
    out = torch.zeros(1024, device="cuda")
    found = {}
    for overlaps in (False, True):
        for cluster in (1, 8):
            kernel = program.kernel("chained", Launch(128, cluster, 128, overlaps=overlaps))

            def chain(kernel: Callable[[torch.Tensor], None] = kernel) -> None:
                for _ in range(CHAIN):
                    kernel(out)

            with capturing(out.device):
                chain()
                graph = captured(chain)
            how = "dependent launch" if overlaps else "ordinary launch"
            found[f"kernel to kernel, {how}, clusters of {cluster}"] = median_us(
                graph.replay, CHAIN
            )
    return found


def clusters_at_once(program: Program) -> dict[str, float]:
    """Clusters that run at the same time when a block takes a whole multiprocessor."""
    return {
        f"clusters of {size} at once": program.kernel(
            "chained", Launch(size, size, 512, 200 << 10)
        ).most_active_clusters()
        for size in (2, 4, 8, 16)
    }


def main(arguments: Sequence[str]) -> int:
    """Prints all of them."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.latency", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_json(parser)
    options = parser.parse_args(arguments)
    results = Results(options.json, ["python", "-m", "bench.gpu.latency", *arguments])
    program = Program(SOURCE, {})
    for part in (barriers, kernel_to_kernel, clusters_at_once):
        for name, value in part(program).items():
            results.say(f"{name:<54}{value:8.2f}")
            results.add("latency", {"name": name, "value": value})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
