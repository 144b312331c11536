"""Orders from rank 0 to the other ranks: every life-cycle call and every step before it runs.

There are no answers: `parallel.group` checks whether all ranks succeeded. In a group of one rank
nothing is sent.
"""

from collections.abc import Sequence
from pathlib import Path

from torch._C._distributed_c10d import Store

from pagewire.v1 import rank_pb2, worker_pb2
from pagewire.v1.rank_pb2 import RankOrder
from worker_svc.device.device import resolve_device
from worker_svc.parallel import group
from worker_svc.parallel.group import ALONE, Group
from worker_svc.process.pipe import MessagePipe


class Ranks:
    """Pipes between ranks: rank 0 has one to each other rank, other ranks have one to rank 0."""

    def __init__(self, rank: int = 0, size: int = 1, pipes: Sequence[MessagePipe] = ()) -> None:
        self.rank = rank
        self.size = size
        self.pipes = pipes
        self.store_port = 0  # set once rank 0 has created the store
        self._store: Store | None = None
        self._group: Group | None = ALONE if size == 1 else None
        self._addresses: tuple[str, ...] = ()
        self._frame: bytes | None = None  # a frame with no step sent yet

    def join(self, device: str, all_reduce: str = "auto") -> Group:
        """Returns this rank's group; the first call, on the compute thread, waits for all ranks."""
        if self._group is None:
            if self._store is None:
                self._store = group.reach_store(self.store_port, self.size)
            own = group.device_of(self.rank, self.size, resolve_device(device))
            self._group = group.join(self.rank, self.size, self._store, own, all_reduce)
        return self._group

    def addresses(self, own: str) -> tuple[str, ...]:
        """Addresses of all ranks, received through the pipes; empty except on rank 0 of several."""
        if self._leads and not self._addresses:
            others = (pipe.receive().decode() for pipe in self.pipes)
            self._addresses = own, *others
        return self._addresses

    # --- orders of rank 0, each sent before rank 0 executes it -----------------------------------

    def load_model(self, folder: Path, dtype: str, served_model_name: str) -> None:
        if not self._leads:
            return
        if self._store is None:
            store = group.host_store(self.size)
            self._store, self.store_port = store, store.port
        request = worker_pb2.LoadModelRequest(
            path=str(folder), dtype=dtype, served_model_name=served_model_name
        )
        order = rank_pb2.LoadOrder(request=request, store_port=self.store_port)
        self._tell(RankOrder(load=order))

    def initialize_cache(self, num_blocks: int) -> None:
        request = worker_pb2.InitializeCacheRequest(num_blocks=num_blocks)
        self._tell(RankOrder(initialize_cache=request))

    def warm_up(self) -> None:
        self._tell(RankOrder(warm_up=worker_pb2.WarmUpRequest()))

    def take(self, frame: bytes) -> None:
        """Records a checked frame of the step stream, to be sent with its first step."""
        self._frame = frame

    def compute_step(self) -> None:
        """Orders the frame's first step, or the next granted step."""
        if self._frame is None:
            self._tell(RankOrder(granted_step=rank_pb2.GrantedStep()))
        else:
            self._tell(RankOrder(frame=self._frame))
        self._frame = None

    def apply_changes(self) -> None:
        """Orders the changes of a frame without any of its steps."""
        assert self._frame is not None  # else its first step has applied the changes
        self._tell(RankOrder(changes=self._frame))

    def prepare(self, frame: bytes) -> None:
        """Orders the grammars of a frame to be prepared; empty: all prepared to be forgotten."""
        self._tell(RankOrder(prepare=frame))

    def forget_rows(self) -> None:
        self._tell(RankOrder(forget_rows=rank_pb2.ForgetRows()))

    @property
    def _leads(self) -> bool:
        return self.rank == 0 and self.size > 1

    def _tell(self, order: RankOrder) -> None:
        if not self._leads:
            return
        message = order.SerializeToString()
        for pipe in self.pipes:
            pipe.send(message)
