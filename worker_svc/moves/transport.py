"""Transports: ways by which a worker's blocks go to another one, which pulls them.

Only the receiver's process writes the receiver's blocks. So a worker that ends, or is slow, harms
no block of another; what it has not sent is computed. A package adds a transport by an entry point
of the group `pagewire.kv_transport`: a subclass of `KvTransport`, made of `TransportOptions`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from importlib import import_module

import torch

from wire import plug_ins
from wire.identity.options import IdentityOptions
from worker_svc.attention.kv_cache import PagedCache
from worker_svc.protocol.step import IntColumn
from worker_svc.protocol.transfers import Peer

PLUG_INS = "pagewire.kv_transport"
BUILT_IN = {
    "copy": "worker_svc.moves.copy_transport:CopyTransport",
    "tcp": "worker_svc.moves.tcp_transport:TcpTransport",
}


class UnknownTransport(ValueError):
    """A transport that there is not, or a plug-in that cannot be used; the message names it."""


class SourceRefused(Exception):
    """Raised where a worker does not let this one read its blocks; the message says why."""


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """The address to listen on, and whom to let connect."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: any free one
    identity: IdentityOptions = field(default_factory=IdentityOptions)


@dataclass(frozen=True, slots=True)
class OwnKv:
    """The cache of this worker."""

    cache: PagedCache
    device: torch.device
    incarnation: int
    layout_hash: bytes


@dataclass(frozen=True, slots=True)
class PullEnd:
    """The end of a pull."""

    num_blocks: int  # leading blocks that are whole
    problem: str = ""  # empty if all are


class Transfer(ABC):
    """One pull. After its end no byte of it is written any more."""

    @abstractmethod
    def poll(self) -> PullEnd | None:
        """Goes on for a short time; returns the end once it is there. May raise, which ends it."""

    @abstractmethod
    def cancel(self) -> None:
        """Has `poll` end it soon."""


class PeerSource(ABC):
    """A worker whose blocks can be read. One thread uses it, one pull after the other."""

    @abstractmethod
    def fetch(self, theirs: IntColumn, ours: IntColumn) -> Transfer:
        """Begins to fill own blocks from blocks of the source, in this order. May raise."""

    @abstractmethod
    def close(self) -> None:
        """Ends the connection."""


class KvTransport(ABC):
    """One way for blocks. Made once in a process."""

    @abstractmethod
    def __init__(self, options: TransportOptions) -> None:
        """Raises what ends the start-up, as for a port that is taken."""

    @abstractmethod
    def expose(self, kv: OwnKv) -> bytes:
        """Lets others read the cache; returns the handle by which they find it. Called once."""

    @abstractmethod
    def connect(self, peer: Peer) -> PeerSource:
        """Connects to a worker; may block and raise, SourceRefused among others."""

    @abstractmethod
    def close(self) -> None:
        """Lets no other worker read the cache any more."""


def open_transport(name: str, options: TransportOptions) -> KvTransport:
    """The transport of a name. Raises UnknownTransport, which lists those that there are."""
    value = BUILT_IN.get(name)
    if value is not None:
        module, _, attribute = value.partition(":")
        made: type[KvTransport] = getattr(import_module(module), attribute)
        return made(options)
    try:
        found = plug_ins.find(PLUG_INS, name)
    except plug_ins.BadPlugIn as error:
        raise UnknownTransport(f"--kv-transport: {error}") from error
    if found is None:
        known = ", ".join((*BUILT_IN, *plug_ins.names(PLUG_INS)))
        raise UnknownTransport(f"--kv-transport: {name!r} is unknown; known are {known}")
    plugged_in = found.value
    if not (isinstance(plugged_in, type) and issubclass(plugged_in, KvTransport)):
        raise UnknownTransport(f"--kv-transport: the plug-in {found.place} is no KvTransport")
    return plugged_in(options)
