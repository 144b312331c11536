"""What is launched ahead of a decode graph, and how long its kernels then wait for each other.

    python -m bench.pauses --batch 32

A graph's kernels follow each other closely or with pauses, depending on what was launched last
(docs/performance.md). Each kind of work here is launched once with the graph in either state, and
the graph is then replayed alone and timed. Needs a CUDA device; Qwen3-0.6B with random weights.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from bench import checkpoints
from bench.gpu_steps import side_by_side
from kernels.prime import prime
from worker_svc import inputs, startup
from worker_svc.config import WorkerConfig
from worker_svc.cuda_runner import CudaRunner
from worker_svc.parallel import ALONE
from worker_svc.step import RowSampling

SHAPE = "qwen3-0.6b"
CONTEXT = 576
REPLAYS = 12
ROUNDS = 3
CHAINS = (1, 2, 3, 5, 10)

Work = Callable[[], object]


def main(arguments: Sequence[str]) -> int:
    """Prints a table of microseconds for one replay."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.pauses", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("bench.pauses needs a CUDA device")
    runner = _runner(options.batch)
    works = _works(runner)
    pauses, close = works["ordinary kernel"], works["forward pass of two tokens"]
    print(f"{'launched ahead':28} {'with pauses before':>20} {'without before':>16}")
    for name, work in works.items():
        found = [_replay_us(runner, options.batch, state, work) for state in (pauses, close)]
        print(f"{name:28} {found[0]:20.0f} {found[1]:16.0f}", flush=True)
    return 0


def _runner(batch: int) -> CudaRunner:
    config = WorkerConfig(
        device="cuda",
        attention_backend="triton",
        max_num_seqs=batch,
        max_model_len=2 * CONTEXT,
        num_kv_blocks=2 + batch * -(-2 * CONTEXT // 16),
    )
    with checkpoints.temporary(SHAPE) as folder:
        model = startup.load(config, folder, "auto", "", ALONE)
        runner = startup.build_runner(config, model, config.num_kv_blocks)
    assert isinstance(runner, CudaRunner)
    runner.warm_up()
    return runner


def _decode(runner: CudaRunner, batch: int) -> None:
    """One decode step of as many rows; each replay behind it computes a token more."""
    per_row = -(-2 * CONTEXT // runner.limits.block_size)
    step = side_by_side(batch, CONTEXT, per_row, RowSampling())
    output = runner.execute(step)
    if output.error:
        raise RuntimeError(output.error)


def _works(runner: CudaRunner) -> dict[str, Work]:
    """What may be launched ahead; the first two leave the graph in either state."""
    device = runner.slots.device
    small = torch.zeros(1, dtype=torch.int32, device=device)
    square = torch.randn(1024, 1024, device=device, dtype=torch.bfloat16)
    pinned = torch.zeros(1, dtype=torch.int32).pin_memory()
    return {
        "ordinary kernel": partial(small.add_, 1),
        "forward pass of two tokens": partial(_forward, runner, device),
        "nothing": lambda: None,
        "copy to the device": partial(small.copy_, pinned, non_blocking=True),
        "product of the library": partial(torch.mm, square, square),
        **{f"chain of {n}": partial(prime, small, n) for n in CHAINS},
        **{f"ordinary, chain of {n}": partial(_ordinary_first, small, n) for n in CHAINS},
    }


def _forward(runner: CudaRunner, device: torch.device) -> Tensor:
    return runner._forward(inputs.build_idle(runner.limits, [2], device))


def _ordinary_first(scratch: Tensor, length: int) -> None:
    scratch.add_(1)
    prime(scratch, length)


@torch.inference_mode()
def _replay_us(runner: CudaRunner, batch: int, state: Work, work: Work) -> float:
    """One replay behind the work, of a graph that was in the state before it."""
    graph, found = runner.graphs.graph(batch), []
    for _ in range(ROUNDS):
        _decode(runner, batch)  # all rows are at the same context again
        state()
        for _ in range(REPLAYS):
            graph.replay()
        work()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / REPLAYS * 1e3)
    return float(statistics.median(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
