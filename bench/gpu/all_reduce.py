"""Times sums over the GPUs of a host: NCCL followed by an add and a norm, and the own kernel.

    python -m bench.gpu.all_reduce --size 2

Each number is one call inside a CUDA graph of many; each call waits for the previous one and for
all ranks. The link's rate is the bytes that a rank sends, divided by the time of the whole call.
"""

import argparse
import copy
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from bench.harness.records import Results, add_json
from kernels.comm.all_gather import all_gather
from kernels.comm.all_reduce import all_reduce
from kernels.norm.rms_norm import add_rms_norm
from worker_svc.device.capture_stream import captured
from worker_svc.parallel import group as parallel
from worker_svc.parallel.group import Group
from worker_svc.parallel.peer_memory import Slot

ROWS = (1, 2, 8, 16, 32, 64, 128, 256, 512)
EPS = 1e-6
CALLS = 36  # per graph; even, since slots alternate
REPLAYS = 50


@dataclass(frozen=True, slots=True)
class RowTiming:
    """Microseconds of one call with this number of rows."""

    rows: int
    nccl: float
    nccl_add_norm: float
    own_sum: float  # with the residual
    own_norm: float  # with residual and norm
    sent_gb_per_s: float  # per rank, in the call with the norm


class Bench:
    """One rank: all ranks time the same calls in the same order."""

    def __init__(self, group: Group, width: int) -> None:
        assert group.peers is not None
        self._group = group
        self._library = copy.copy(group)
        self._library.peers = None
        self._inboxes = group.peers.inboxes
        self._num_calls = 0
        self._width = width

    def time_rows(self, num_rows: int) -> RowTiming:
        x, residual = torch.randn((2, num_rows, self._width), device="cuda").bfloat16()
        weight = torch.ones_like(x[0])

        def own(norm_weight: Tensor | None) -> None:
            all_reduce(x, self._inboxes, self._next_slot(), residual, norm_weight, EPS)

        def library() -> None:
            add_rms_norm(self._library.all_reduce(x), residual, weight, EPS)

        nccl = self._time(lambda: self._library.all_reduce(x))
        nccl_add_norm = self._time(library)
        own_norm = self._time(lambda: own(weight))
        sent = (self._group.size - 1) * x.nbytes / own_norm / 1e3
        return RowTiming(
            num_rows, nccl, nccl_add_norm, self._time(lambda: own(None)), own_norm, sent
        )

    def time_gather(self, num_numbers: int) -> tuple[float, float]:
        """Microseconds of (NCCL, own kernel), gathering `num_numbers` float64 per rank."""
        x = torch.randn((num_numbers, 2), device="cuda", dtype=torch.float64)
        return (
            self._time(lambda: self._library.all_gather(x)),
            self._time(lambda: all_gather(x, self._inboxes, self._next_slot())),
        )

    def _next_slot(self) -> Slot:
        self._num_calls += 1
        return Slot.ATTENTION if self._num_calls % 2 else Slot.MLP

    def _time(self, call: Callable[[], object]) -> float:
        def calls() -> None:
            for _ in range(CALLS):
                call()

        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        start, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        with torch.cuda.stream(stream):
            for _ in range(2):
                call()
            self.meet(stream)
            graph = captured(calls)
            for _ in range(3):
                graph.replay()
            self.meet(stream)
            start.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
            stream.synchronize()
        return float(start.elapsed_time(end)) * 1000 / CALLS / REPLAYS

    def meet(self, stream: torch.cuda.Stream) -> None:
        """Waits for the stream, then for the other ranks."""
        stream.synchronize()
        self._group.together(lambda: None)


def run(rank: int, size: int, port: int, width: int, report: Callable[..., None]) -> None:
    """Runs one rank; rank 0 starts the others and reports."""
    device = parallel.device_of(rank, size, torch.device("cuda"))
    store = parallel.reach_store(port, size) if rank else parallel.host_store(size)
    command = [
        sys.executable,
        "-m",
        "bench.gpu.all_reduce",
        *sys.argv[1:],
        "--port",
        str(store.port),
    ]
    if rank == 0:
        for other in range(1, size):
            subprocess.Popen([*command, "--rank", str(other)])
    bench = Bench(parallel.join(rank, size, store, device, all_reduce="peer"), width)
    for num_rows in ROWS:
        report("all_reduce", asdict(bench.time_rows(num_rows)))
    for num_numbers in (1, 320, 2560):
        nccl, own = bench.time_gather(num_numbers)
        report("all_gather", {"rows": num_numbers, "nccl": nccl, "own": own})
    bench.meet(torch.cuda.current_stream())


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.all_reduce", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--size", type=int, default=2, help="GPUs")
    parser.add_argument("--width", type=int, default=4096, help="elements of a row")
    for hidden in ("--rank", "--port"):
        parser.add_argument(hidden, type=int, default=0, help=argparse.SUPPRESS)
    add_json(parser)
    options = parser.parse_args(arguments)
    is_first = options.rank == 0
    told = Results(
        options.json if is_first else None, ["python", "-m", "bench.gpu.all_reduce", *arguments]
    )

    def report(benchmark: str, values: dict[str, float]) -> None:
        if is_first:
            columns = "  ".join(f"{name} {value:.2f}" for name, value in values.items())
            told.say(f"{benchmark} {columns}")
            told.add(benchmark, {"size": options.size, "width": options.width, **values})

    run(options.rank, options.size, options.port, options.width, report)
    logging.shutdown()
    os._exit(0)  # communicators would wait for ranks that have ended


if __name__ == "__main__":
    main(sys.argv[1:])
