"""The processes that compute one model together: what they add up, gather, and agree on.

Every rank runs the same steps in the same order, so collectives meet without being announced. They
are the one thing that crosses ranks while a step runs: a faster all-reduce goes in here. What is
agreed on, away from steps, goes through a store of texts, which works when collectives do not.
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
from worker_svc.process.exit_codes import Ending, end_process

T = TypeVar("T")

log = logging.getLogger(__name__)

# A rank that waits this long in a collective gives up; ranks compile kernels side by side, and one
# of them may have a slow core. A rank that dies, is stopped or hangs is noticed by others before.
COLLECTIVE_TIMEOUT = timedelta(minutes=15)
# A phase of start-up: the slowest rank may read a large checkpoint from a slow disk.
PHASE_TIMEOUT = timedelta(hours=1)
# Ranks that fail alike fail at nearly the same time.
FAILURE_TIMEOUT = timedelta(seconds=5)


class RankFailed(RuntimeError):
    """Another rank could not do what all must do."""


def abandon(reason: str) -> NoReturn:
    """Ends this process, and with it the group: ranks at different places cannot go on."""
    end_process(Ending.RANKS_APART, reason)


class Group:
    """The ranks of one model, seen from one of them. Only the compute thread calls it."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        collectives: Any = None,  # a process group of torch; None: this rank is alone
        store: Store | None = None,
        give_up: Callable[[str], None] = abandon,
        peers: PeerMemory | None = None,  # a quicker way to add up a few rows
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
        """What makes the sums over ranks, in words; empty if there is one rank."""
        if self.size == 1:
            return ""
        library = "gloo" if isinstance(self._collectives, ProcessGroupGloo) else "nccl"
        if self.peers is None:
            return library
        return f"peer memory, {library} above {self.peers.inboxes.num_bytes >> 10} KiB"

    # --- while steps run -------------------------------------------------------------------------

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum over the ranks, the same bits on each; it may overwrite its argument."""
        if self.size == 1:
            return partial
        self.num_collectives += 1
        options = AllreduceOptions()
        options.asyncOp = False
        _finish(self._collectives.allreduce([partial], options))
        return partial

    def inboxes_for(self, num_bytes: int) -> Inboxes | None:
        """Where kernels of all ranks exchange so much; None: leave the sum to `all_reduce`."""
        if self.peers is None or not self.peers.inboxes.hold(num_bytes):
            return None
        self.num_collectives += 1
        return self.peers.inboxes

    def all_gather(self, part: Tensor) -> Tensor:
        """Columns [R, N] of each rank -> [R, size * N], in the order of the ranks."""
        num_rows, width = part.shape
        return self.gather(part).transpose(0, 1).reshape(num_rows, self.size * width)

    def gather(self, part: Tensor) -> Tensor:
        """A tensor of each rank, all of one shape -> [size, *shape], in the order of the ranks."""
        if self.size == 1:
            return part[None]
        self.num_collectives += 1
        gathered = None if self.peers is None else self.peers.gather(part)
        if gathered is not None:
            return gathered
        parts = part.new_empty((self.size, *part.shape))
        options = AllgatherOptions()
        options.asyncOp = False
        # Flat: that is the shape in which all backends take it.
        _finish(
            self._collectives._allgather_base(parts.view(-1), part.contiguous().view(-1), options)
        )
        return parts

    def confirm_failure(self) -> None:
        """To be called where a step has failed: returns if it failed on every rank alike.

        A rank that fails alone leaves the others in a collective which it never enters. Nothing
        but a new start ends that, so it gives up.
        """
        if self.size == 1:
            return
        try:
            if self.peers is not None:
                # Any slot may be next: none may still be in use.
                torch.cuda.synchronize()
            counts = self._exchange(str(self.num_collectives), FAILURE_TIMEOUT)
        except RuntimeError:
            self._give_up(f"rank {self.rank}: a step failed here and not on every rank")
            return
        if len(set(counts)) > 1:
            self._give_up(f"ranks failed in different places, after {counts} collectives")

    # --- between steps ---------------------------------------------------------------------------

    def together(self, work: Callable[[], T]) -> T:
        """Runs work on every rank; raises on all of them if it failed on one."""
        return self._share(work, lambda result: "")[0]

    def smallest(self, work: Callable[[], int]) -> int:
        """The least of what work returns on the ranks; raises on all if it failed on one."""
        return min(int(text) for text in self._share(work, str)[1])

    def of_first(self, work: Callable[[], str]) -> str:
        """What work returns on rank 0, where alone it runs; raises on all if it failed there."""
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
        """Every rank's text; raises RuntimeError if one says nothing in time."""
        assert self._store is not None
        keys = [f"pagewire/{self._num_exchanges}/{rank}" for rank in range(self.size)]
        self._num_exchanges += 1
        self._store.set(keys[self.rank], text)
        self._store.wait(keys, timeout)
        return [self._store.get(key).decode() for key in keys]


ALONE = Group()


def host_store(size: int) -> TCPStore:
    """Where the ranks of this host meet, on any free port; to be made by rank 0."""
    return TCPStore(
        "127.0.0.1", 0, size, is_master=True, wait_for_workers=False, timeout=COLLECTIVE_TIMEOUT
    )


def reach_store(port: int, size: int) -> TCPStore:
    """The store of rank 0, for the others."""
    return TCPStore("127.0.0.1", port, size, is_master=False, timeout=COLLECTIVE_TIMEOUT)


def join(
    rank: int, size: int, store: Store, device: torch.device, all_reduce: str = "auto"
) -> Group:
    """Enters the group, as the thread that will compute; returns when all ranks have.

    NCCL between CUDA devices, gloo between CPU processes.
    """
    if device.type == "cpu":
        if all_reduce != "auto":
            raise ValueError(f"all_reduce: {all_reduce} is for CUDA devices")
        if sys.platform == "linux":  # gloo looks the host's name up, which may resolve to nothing
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        gloo = ProcessGroupGloo(store, rank, size, COLLECTIVE_TIMEOUT)
        return Group(rank, size, gloo, store)
    # Multicast over NVLink can take a host's devices out of service.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    dist.init_process_group(
        "nccl",
        store=PrefixStore("nccl", store),
        rank=rank,
        world_size=size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device,  # connects now, and not inside the first step
    )
    group = Group(rank, size, dist.group.WORLD, store)
    group.all_reduce(torch.zeros(1, device=device))
    torch.cuda.synchronize(device)
    if all_reduce != "nccl":
        group.peers = _open_peers(group, device, all_reduce)
    log.info("sums over ranks by %s", group.adds_up_by)
    return group


def _open_peers(group: Group, device: torch.device, wanted: str) -> PeerMemory | None:
    """Memory that all ranks can write, or none on any of them."""
    rank, size = group.rank, group.size
    try:
        if not group.smallest(lambda: int(peer_memory.reaches_all(rank, size))):
            raise RuntimeError("the devices do not reach each other's memory")
        peers = group.together(lambda: peer_memory.open_peer_memory(rank, size, device))
    except RuntimeError as error:
        if wanted == "peer":
            raise
        log.warning("sums over ranks are left to NCCL: %s", error)
        return None
    return peers


def device_of(rank: int, size: int, device: torch.device) -> torch.device:
    """The device of a rank: its own on CUDA, which becomes the calling thread's current one."""
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
