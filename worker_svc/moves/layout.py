"""The digest of all that bytes of blocks mean by: workers with another one share no blocks."""

import hashlib

import torch

from worker_svc.attention.kv_cache import PagedCache

_VERSION = 1  # of the order of bytes in a block


def layout_hash(cache: PagedCache, config_sha256: str, rank: int, num_ranks: int) -> bytes:
    """The digest, 32 bytes, of a rank's cache of the model with this config.json."""
    digest = hashlib.sha256()
    facts = (
        _VERSION,
        config_sha256,
        str(cache.dtype),
        cache.block_size,
        cache.block_shape,
        rank,
        num_ranks,
        [(str(one.dtype), tuple(one.shape)) for one in cache.constants],
    )
    digest.update(repr(facts).encode())
    for one in cache.constants:
        digest.update(one.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest()
