"""Group of ranks that compute one model together: collectives and agreement.

Every rank runs the same steps in the same order, so collectives match without coordination; they
are the only communication during a step. Agreement between steps goes through a key-value store,
which works even if collectives do not.
"""

import logging
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

from kernels.comm.inboxes import Inboxes
from worker_svc.parallel import peer_memory
from worker_svc.parallel.peer_memory import PeerMemory
from worker_svc.process.exit_codes import ExitCode, end_process

T = TypeVar("T")

log = logging.getLogger(__name__)

# Timeout of a collective: ranks compile kernels at the same time, and one may have a slow core. A
# rank that dies, is suspended or hangs is detected earlier by the supervisor.
COLLECTIVE_TIMEOUT = timedelta(minutes=15)
# Timeout of a start-up phase: a rank may read a large checkpoint from a slow disk.
PHASE_TIMEOUT = timedelta(hours=1)
# Ranks that fail in the same way fail at nearly the same time.
FAILURE_TIMEOUT = timedelta(seconds=5)


class RankFailed(RuntimeError):
    """An operation that all ranks must complete failed on another rank."""


def abandon(reason: str) -> NoReturn:
    """Ends this process, and so the group: ranks that have diverged cannot continue."""
    end_process(ExitCode.RANKS_APART, reason)


class Group:
    """The ranks of one model, seen from one rank. To be called from the compute thread only."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        collectives: Any = None,  # a torch process group; None for one rank
        store: Store | None = None,
        give_up: Callable[[str], None] = abandon,
        peers: PeerMemory | None = None,  # a faster all-reduce of small tensors
    ) -> None:
        self.rank = rank
        self.size = size
        self.num_collectives = 0
        self.peers = peers
        self._collectives = collectives
        self._store = store
        self._give_up = give_up
        self._num_exchanges = 0

    @property
    def adds_up_by(self) -> str:
        """Description of the all-reduce implementation; empty for one rank."""
        if self.size == 1:
            return ""
        library = "gloo" if isinstance(self._collectives, ProcessGroupGloo) else "nccl"
        if self.peers is None:
            return library
        return f"peer memory, {library} above {self.peers.inboxes.num_bytes >> 10} KiB"

    # --- during steps ----------------------------------------------------------------------------

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Returns the sum over the ranks, bitwise equal on all; may overwrite `partial`."""
        if self.size == 1:
            return partial
        self.num_collectives += 1
        options = AllreduceOptions()
        options.asyncOp = False
        _finish(self._collectives.allreduce([partial], options))
        return partial

    def inboxes_for(self, num_bytes: int) -> Inboxes | None:
        """Peer memory for an all-reduce of num_bytes; None if `all_reduce` must be used."""
        if self.peers is None or not self.peers.inboxes.hold(num_bytes):
            return None
        self.num_collectives += 1
        return self.peers.inboxes

    def all_gather(self, part: Tensor) -> Tensor:
        """Concatenates columns: [R, N] of each rank -> [R, size * N], in rank order."""
        num_rows, width = part.shape
        return self.gather(part).transpose(0, 1).reshape(num_rows, self.size * width)

    def gather(self, part: Tensor) -> Tensor:
        """Stacks a tensor of each rank, all of equal shape -> [size, *shape], in rank order."""
        if self.size == 1:
            return part[None]
        self.num_collectives += 1
        gathered = None if self.peers is None else self.peers.gather(part)
        if gathered is not None:
            return gathered
        parts = part.new_empty((self.size, *part.shape))
        options = AllgatherOptions()
        options.asyncOp = False
        # Flat: the only shape that all backends accept.
        _finish(
            self._collectives._allgather_base(parts.view(-1), part.contiguous().view(-1), options)
        )
        return parts

    def confirm_failure(self) -> None:
        """Must be called after a failed step; returns if the step failed equally on every rank.

        A rank that fails alone leaves the others in a collective that it never enters. Only a
        restart resolves that, so the rank gives up.
        """
        if self.size == 1:
            return
        try:
            if self.peers is not None:
                # Any peer memory slot may be used next, so all kernels must have ended.
                torch.cuda.synchronize()
            counts = self._exchange(str(self.num_collectives), FAILURE_TIMEOUT)
        except RuntimeError:
            self._give_up(f"rank {self.rank}: a step failed here and not on every rank")
            return
        if len(set(counts)) > 1:
            self._give_up(f"ranks failed in different places, after {counts} collectives")

    # --- between steps ---------------------------------------------------------------------------

    def together(self, work: Callable[[], T]) -> T:
        """Runs work on all ranks and returns its result; raises on all if it failed on one."""
        return self._share(work, lambda result: "")[0]

    def smallest(self, work: Callable[[], int]) -> int:
        """Returns the smallest result of work over all ranks; raises on all if it failed on one."""
        return min(int(text) for text in self._share(work, str)[1])

    def of_first(self, work: Callable[[], str]) -> str:
        """Runs work on rank 0 alone; returns its result on all ranks, or raises on all."""
        return self._share(lambda: work() if self.rank == 0 else "", str)[1][0]

    def _share(self, work: Callable[[], T], tell: Callable[[T], str]) -> tuple[T, list[str]]:
        if self.size == 1:
            result = work()
            return result, [tell(result)]
        try:
            result = work()
        except Exception as error:
            self._exchange(f"-{type(error).__name__}: {error}", PHASE_TIMEOUT)
            raise
        answers = self._exchange(f"+{tell(result)}", PHASE_TIMEOUT)
        for rank, answer in enumerate(answers):
            if answer.startswith("-"):
                raise RankFailed(f"rank {rank}: {answer[1:]}")
        return result, [answer[1:] for answer in answers]

    def _exchange(self, text: str, timeout: timedelta) -> list[str]:
        """Returns the text of each rank, in rank order. Raises RuntimeError after the timeout."""
        assert self._store is not None
        keys = [f"pagewire/{self._num_exchanges}/{rank}" for rank in range(self.size)]
        self._num_exchanges += 1
        self._store.set(keys[self.rank], text)
        self._store.wait(keys, timeout)
        return [self._store.get(key).decode() for key in keys]


ALONE = Group()


def host_store(size: int) -> TCPStore:
    """Creates the ranks' key-value store on a free port of this host; called by rank 0."""
    return TCPStore(
        "127.0.0.1", 0, size, is_master=True, wait_for_workers=False, timeout=COLLECTIVE_TIMEOUT
    )


def reach_store(port: int, size: int) -> TCPStore:
    """Connects to rank 0's key-value store; called by the other ranks."""
    return TCPStore("127.0.0.1", port, size, is_master=False, timeout=COLLECTIVE_TIMEOUT)


def join(
    rank: int, size: int, store: Store, device: torch.device, all_reduce: str = "auto"
) -> Group:
    """Joins the group from the compute thread; returns when all ranks have joined.

    Uses NCCL between CUDA devices and gloo between CPU processes.
    """
    if device.type == "cpu":
        if all_reduce != "auto":
            raise ValueError(f"all_reduce: {all_reduce} is for CUDA devices")
        if sys.platform == "linux":  # gloo would resolve the host name, which can fail
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        gloo = ProcessGroupGloo(store, rank, size, COLLECTIVE_TIMEOUT)
        return Group(rank, size, gloo, store)
    # NVLink multicast can make the devices of a host unusable until a reset.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    dist.init_process_group(
        "nccl",
        store=PrefixStore("nccl", store),
        rank=rank,
        world_size=size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device,  # connects now, not in the first step
    )
    group = Group(rank, size, dist.group.WORLD, store)
    group.all_reduce(torch.zeros(1, device=device))
    torch.cuda.synchronize(device)
    if all_reduce != "nccl":
        group.peers = _open_peers(group, device, all_reduce)
    log.info("all-reduce by %s", group.adds_up_by)
    return group


def _open_peers(group: Group, device: torch.device, wanted: str) -> PeerMemory | None:
    """Peer memory of all ranks; None on all ranks if it is unavailable and not required."""
    rank, size = group.rank, group.size
    try:
        if not group.smallest(lambda: int(peer_memory.reaches_all(rank, size))):
            raise RuntimeError("the devices do not reach each other's memory")
        peers = group.together(lambda: peer_memory.open_peer_memory(rank, size, device))
    except RuntimeError as error:
        if wanted == "peer":
            raise
        log.warning("peer memory is not used, all-reduce is by NCCL: %s", error)
        return None
    return peers


def device_of(rank: int, size: int, device: torch.device) -> torch.device:
    """Returns the device of a rank; on CUDA also makes it the thread's current device."""
    if device.type == "cpu" or size == 1:
        return device
    if torch.cuda.device_count() < size:
        raise ValueError(
            f"tensor_parallel_size: {size} ranks need as many CUDA devices, torch finds "
            f"{torch.cuda.device_count()}"
        )
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def _finish(work: Any) -> None:
    if work is not None:
        work.wait()
