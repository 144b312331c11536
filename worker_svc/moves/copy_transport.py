"""Blocks of another worker in this process, copied from cache to cache. For tests."""

import secrets
from typing import ClassVar
from weakref import WeakValueDictionary

import numpy as np
import torch

from worker_svc.moves.staging import AT_ONCE
from worker_svc.moves.transport import (
    KvTransport,
    OwnKv,
    PeerSource,
    PullEnd,
    SourceRefused,
    Transfer,
    TransportOptions,
)
from worker_svc.protocol.step import IntColumn
from worker_svc.protocol.transfers import Peer


class CopyTransport(KvTransport):
    """Finds caches of this process by a random name."""

    _exposed: ClassVar[WeakValueDictionary[bytes, "CopyTransport"]] = WeakValueDictionary()

    def __init__(self, options: TransportOptions) -> None:
        self._handle = secrets.token_bytes(16)
        self.kv: OwnKv | None = None

    def expose(self, kv: OwnKv) -> bytes:
        self.kv = kv
        self._exposed[self._handle] = self
        return self._handle

    def connect(self, peer: Peer) -> PeerSource:
        assert self.kv is not None
        found = self._exposed.get(peer.handle)
        theirs = None if found is None else found.kv
        if theirs is None or theirs.incarnation != peer.incarnation:
            raise SourceRefused(f"there is no worker {peer.incarnation} in this process")
        if theirs.layout_hash != self.kv.layout_hash:
            raise SourceRefused("its blocks have another layout")
        return _Neighbour(theirs, self.kv)

    def close(self) -> None:
        self._exposed.pop(self._handle, None)


class _Neighbour(PeerSource):
    def __init__(self, theirs: OwnKv, ours: OwnKv) -> None:
        self._theirs = theirs
        self._ours = ours

    def fetch(self, theirs: IntColumn, ours: IntColumn) -> Transfer:
        outside = (theirs < 1) | (theirs >= self._theirs.cache.num_blocks)
        if outside.any():
            raise SourceRefused(f"block {theirs[outside.argmax()]} is not in its cache")
        return _CacheCopy(self._theirs, self._ours, theirs, ours)

    def close(self) -> None:
        pass


class _CacheCopy(Transfer):
    def __init__(self, source: OwnKv, target: OwnKv, theirs: IntColumn, ours: IntColumn) -> None:
        self._source = source
        self._target = target
        self._blocks = np.stack([theirs, ours])
        self._num_done = 0
        self._is_cancelled = False

    @torch.inference_mode()
    def poll(self) -> PullEnd | None:
        if self._is_cancelled:
            return PullEnd(self._num_done, "it was cancelled")
        part = self._blocks[:, self._num_done : self._num_done + AT_ONCE]
        theirs, ours = (torch.from_numpy(row).to(self._target.device) for row in part.copy())
        content = self._source.cache.read_blocks(theirs.to(self._source.device))
        self._target.cache.write_blocks(ours, content.to(self._target.device))
        if self._target.device.type == "cuda":
            torch.cuda.synchronize(self._target.device)
        self._num_done += part.shape[1]
        return PullEnd(self._num_done) if self._num_done == self._blocks.shape[1] else None

    def cancel(self) -> None:
        self._is_cancelled = True
