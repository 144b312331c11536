"""Caches whose blocks hold what their number says, and pulls between them."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tests.pace import patience
from worker_svc.attention.kv_cache import KVCache
from worker_svc.moves.layout import layout_hash
from worker_svc.moves.peer_fetches import PeerFetches
from worker_svc.moves.transport import OwnKv, TransportOptions, open_transport
from worker_svc.protocol.transfers import Peer, PeerOrder, TransferEnd

CPU = torch.device("cpu")


@dataclass
class End:
    """One worker's cache and transports."""

    name: str
    incarnation: int = 2**63
    num_blocks: int = 64
    options: TransportOptions = field(default_factory=TransportOptions)
    model: str = "a model"

    def __post_init__(self) -> None:
        self.cache = KVCache(2, self.num_blocks, 4, 1, 8, torch.float32, CPU)
        self.fetches = PeerFetches({self.name: open_transport(self.name, self.options)})
        layout = layout_hash(self.cache, self.model, 0, 1)
        own = OwnKv(self.cache, CPU, self.incarnation, layout)
        self.handle = self.fetches.begin(own)[self.name]
        self.answers: dict[int, TransferEnd] = {}

    def fill(self) -> None:
        """Writes each block's number into it."""
        ids = torch.arange(self.num_blocks)
        shape = (self.num_blocks, *(1 for _ in self.cache.block_shape))
        self.cache.write_blocks(
            ids, ids.float().view(shape).expand(-1, *self.cache.block_shape).contiguous()
        )

    def contents(self, block_ids: Sequence[int]) -> list[float]:
        """The number that each block holds everywhere."""
        found = self.cache.read_blocks(torch.tensor(block_ids)).flatten(1)
        assert bool((found == found[:, :1]).all()), "a block is torn"
        return found[:, 0].tolist()

    def peer(self, **fields: object) -> Peer:
        """This worker, as another one is told of it."""
        told: dict[str, object] = {
            "address": "127.0.0.1:1",
            "incarnation": self.incarnation,
            "transport": self.name,
            "handle": self.handle,
        }
        return Peer(**(told | fields))  # type: ignore[arg-type]

    def submit(self, number: int, peer: Peer, theirs: Sequence[int], ours: Sequence[int]) -> None:
        order = PeerOrder(number, np.array(ours), np.array(theirs), peer)
        self.fetches.submit(order, lambda: False, self._answer)

    def pull(self, peer: Peer, theirs: Sequence[int], ours: Sequence[int]) -> TransferEnd:
        """Pulls blocks and returns the answer."""
        number = len(self.answers) + 1
        self.submit(number, peer, theirs, ours)
        self.wait()
        return self.answers[number]

    def wait(self) -> None:
        """Returns once all pulls are answered."""
        done = threading.Event()
        self.fetches.when_done(done.set)
        assert done.wait(patience(30))

    def _answer(self, number: int, end: TransferEnd) -> None:
        assert number not in self.answers, "answered twice"
        self.answers[number] = end

    def close(self) -> None:
        self.fetches.close()
