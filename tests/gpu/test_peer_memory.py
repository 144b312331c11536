"""All-reduce over peer memory of two GPUs: bitwise equal on both, with any delays."""

import random
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

from kernels import reference
from worker_svc.parallel import group as parallel
from worker_svc.parallel.group import Group
from worker_svc.parallel.peer_memory import Slot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]

SIZE = 2
WIDTH = 4096
EPS = 1e-6
Work = Callable[[Group], Any]


def on_two_gpus(work: Work) -> list[Any]:
    """Runs `work`, a function of this module, on each rank in its own process; returns results."""
    store = parallel.host_store(SIZE)
    context = mp.get_context("spawn")
    ends = [context.Pipe(duplex=False) for _ in range(SIZE)]
    processes = [
        context.Process(target=_run, args=(work, rank, store.port, ends[rank][1]))
        for rank in range(SIZE)
    ]
    try:
        for process in processes:
            process.start()
        for _, sender in ends:
            sender.close()  # so that the pipe ends when the child dies
        return [receiver.recv() for receiver, _ in ends]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _run(work: Work, rank: int, port: int, sender: Connection) -> None:
    device = parallel.device_of(rank, SIZE, torch.device("cuda"))
    store = parallel.reach_store(port, SIZE)
    sender.send(work(parallel.join(rank, SIZE, store, device, all_reduce="peer")))


def parts_of(call: int, num_rows: int) -> list[Tensor]:
    """The addends of all ranks and the residual, equal in every process."""
    generator = torch.Generator("cuda").manual_seed(call)
    shape = (SIZE + 1, num_rows, WIDTH)
    return list(torch.randn(shape, generator=generator, device="cuda").bfloat16())


def sums_of_random_sizes(group: Group) -> list[list[float]]:
    from kernels.comm.all_reduce import all_reduce  # noqa: PLC0415 - needs Triton

    peers, found = group.peers, []
    assert peers is not None
    most = peers.inboxes.num_bytes // (2 * WIDTH)
    sizes = random.Random(0)
    weight = parts_of(1000, 1)[0][0]
    for call in range(200):
        num_rows = sizes.choice([1, 2, 16, sizes.randint(1, most), most])
        *parts, residual = parts_of(call, num_rows)
        norm = weight if call % 3 else None
        total, normed = all_reduce(
            parts[group.rank], peers.inboxes, call % len(Slot), residual, norm, EPS
        )
        expected, _ = reference.all_reduce(parts, residual, None, EPS)
        assert torch.equal(total, expected), f"call {call} of {num_rows} rows"
        found.append([float(t.double().abs().sum()) for t in (total, normed) if t is not None])
    return found


def test_both_ranks_have_the_bits_of_the_sum_rounded_once() -> None:
    one, other = on_two_gpus(sums_of_random_sizes)
    assert one == other


def gathers_in_a_row(group: Group) -> bool:
    """Small all-reduces in succession, and one that is too large for the kernel."""
    for call, num_numbers in enumerate((1, 5, 700, 40_000, 3, 3, 500_000, 2)):
        parts = [
            torch.full((num_numbers,), call + rank / 2, dtype=torch.float64, device="cuda")
            for rank in range(SIZE)
        ]
        if not torch.equal(group.gather(parts[group.rank]), torch.stack(parts)):
            return False
    return True


def test_gathers_may_follow_each_other() -> None:
    assert on_two_gpus(gathers_in_a_row) == [True, True]


REPLAYS = 10_000


def replays_with_delays(group: Group) -> int:
    """Number of wrong results in many replays of six dependent all-reduces."""
    from kernels.comm.all_reduce import all_reduce  # noqa: PLC0415

    peers = group.peers
    assert peers is not None
    x = torch.zeros((3, WIDTH), device="cuda", dtype=torch.bfloat16)
    zeros, results = torch.zeros_like(x), []

    def step() -> None:
        residual = zeros
        for call in range(6):
            residual, _ = all_reduce(x, peers.inboxes, call % 2, residual)
            results.append(residual)

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        step()
        stream.synchronize()
        results.clear()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            step()
        delays, num_wrong = random.Random(group.rank), torch.zeros(1, device="cuda")
        for replay in range(REPLAYS):
            if delays.random() < 0.02:
                torch.cuda._sleep(int(delays.random() * 2_000_000))  # about a millisecond
            x.fill_(float(replay % 5) + group.rank)
            graph.replay()
            both = 2 * (replay % 5) + 1
            for call, result in enumerate(results):
                num_wrong += (result != (call + 1) * both).any()
        stream.synchronize()
    return int(num_wrong)


def test_ten_thousand_replays_while_either_rank_is_late_at_random() -> None:
    assert on_two_gpus(replays_with_delays) == [0, 0]


KEPT: list[Group] = []  # freeing memory of a lost device would abort


def wait_alone(group: Group) -> str:
    from kernels.comm import all_reduce, exchange  # noqa: PLC0415

    exchange.MAX_LOOKS = 1 << 16
    KEPT.append(group)
    peers, x = group.peers, torch.ones((1, WIDTH), device="cuda")
    assert peers is not None
    if group.rank == 0:
        all_reduce.all_reduce(x, peers.inboxes, Slot.MLP)
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_rank_whose_peer_never_sends_gives_up() -> None:
    try:
        said = on_two_gpus(wait_alone)[0]
    except EOFError:  # NCCL's watchdog has aborted the process first
        return
    assert "CUDA error" in said
