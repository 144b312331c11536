"""The identity of KV beyond its tokens: what a chain of blocks begins with, and its pictures.

Equal tokens have equal KV only under the same salt, cache type, weights and adapter, and only where
their placeholders stand for the same pictures. Block hashes contain all of these, but 64 bits
can collide. So a cached block also keeps its *origin*: 128 bits over the root and the pictures up
to its end, which a lookup compares as it compares tokens. A sequence that sets none of these has no
origin, and its blocks have an origin of zeros.
"""

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.request.block_hash import root_of
from scheduler_svc.core.request.request import MAX_CONTENT_ID, Extras

_ORIGIN_BYTES = 16
Digests = NDArray[np.uint64]  # [n, 2] 128 bits each


@dataclass(frozen=True, slots=True)
class Root:
    """The parent of the first block of a chain; empty texts stand for what is not set."""

    salt: str = ""  # of the request
    namespace: str = ""  # of the worker's blocks: their type, where that is not the model's own
    weights_version: str = ""  # of the worker
    adapter_id: str = ""  # of the request

    @property
    def hash(self) -> int:
        """The parent hash of the first block; NO_PARENT when nothing is set."""
        return root_of(self.salt, self.namespace, self.weights_version, self.adapter_id)

    def __bool__(self) -> bool:
        return bool(self.salt or self.namespace or self.weights_version or self.adapter_id)

    def to_bytes(self) -> bytes:
        """The fields, each after its length, so that no two roots have the same bytes."""
        fields = (self.salt, self.namespace, self.weights_version, self.adapter_id)
        encoded = [field.encode() for field in fields]
        return b"".join(len(field).to_bytes(4, "little") + field for field in encoded)


@dataclass(frozen=True, slots=True)
class Origins:
    """The origins of a sequence's blocks: they change where a picture begins."""

    begins: NDArray[np.int64]  # [extras] first position of each picture
    digests: Digests  # [extras + 1, 2] over the root and so many pictures

    def of_blocks(self, begin: int, end: int, block_size: int) -> Digests:
        """The origins [end - begin, 2] of the blocks from `begin` up to (not including) `end`."""
        ends = np.arange(begin + 1, end + 1) * block_size
        return self.digests[np.searchsorted(self.begins, ends, side="left")]

    @property
    def last(self) -> Digests:
        """The origin [2] of all blocks after the last picture."""
        last: Digests = self.digests[-1]
        return last


def origins_of(root: Root, extras: Extras) -> Origins | None:
    """The origins of a sequence's blocks; None without anything but tokens."""
    if not root and not extras:
        return None
    hashed = blake2b(root.to_bytes(), digest_size=_ORIGIN_BYTES)
    # Before its first picture a sequence without a root shares blocks with those without pictures.
    digests = [hashed.digest() if root else bytes(_ORIGIN_BYTES)]
    for extra in extras:
        hashed.update(extra.to_bytes())
        digests.append(hashed.digest())
    begins = np.array([extra.begin for extra in extras], dtype=np.int64)
    return Origins(begins, np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2))


def extras_problem(extras: Extras, num_tokens: int, most: int | None = None) -> str | None:
    """Why pictures cannot stand among so many prompt tokens; None when they can.

    `most` are the tokens that one may have; None: any number.
    """
    end = 0
    for index, extra in enumerate(extras):
        if not end <= extra.begin < extra.end <= num_tokens:
            place = f"{extra.begin}..{extra.end}"
            return f"extras[{index}] is at {place}: not after the one before and inside the prompt"
        if not 0 <= extra.content_id <= MAX_CONTENT_ID:
            return f"extras[{index}]: content_id has more than 128 bits"
        if most is not None and extra.end - extra.begin > most:
            return (
                f"extras[{index}] has {extra.end - extra.begin} tokens, and a step, which has to "
                f"compute all of a picture, at most {most}"
            )
        end = extra.end
    return None
