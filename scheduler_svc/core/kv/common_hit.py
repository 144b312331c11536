"""The longest prefix that the caches of all KV groups hold."""

from dataclasses import dataclass
from math import lcm

from scheduler_svc.core.kv.prefix_cache import PrefixCache
from scheduler_svc.core.request.kv_groups import KvGroup
from scheduler_svc.core.request.sequence import Sequence

Groups = tuple[KvGroup, ...]
Caches = tuple[PrefixCache, ...]  # by group


@dataclass(frozen=True, slots=True)
class GroupHit:
    """The blocks of one group to reuse."""

    num_null: int  # leading blocks that are not read
    shared: list[int]  # the blocks after them


def common_hit(
    groups: Groups, caches: Caches, sequence: Sequence, most: int
) -> tuple[int, list[GroupHit]]:
    """The longest hit of all groups within the first `most` tokens of a sequence.

    Returns (its tokens, its blocks by group). It ends where a block of every group ends.
    """
    stride = lcm(*(group.block_size for group in groups))
    end = most - most % stride
    found: dict[int, list[int]] = {}  # by group
    runs: dict[int, list[int]] = {}  # of groups with a window
    # Groups without one come first: they bound the search, and one lookup of each does it.
    for index in sorted(range(len(groups)), key=lambda index: groups[index].window is not None):
        group, cache = groups[index], caches[index]
        size, token_ids, origins = group.block_size, sequence.token_ids, None
        hashes = sequence.block_hashes(size)[: end // size]
        if sequence.origins is not None:
            origins = sequence.origins.of_blocks(0, len(hashes), size)
        if group.window is None:
            found[index] = cache.lookup(hashes, token_ids, sequence.root, origins)
            end = len(found[index]) * size
            end -= end % stride
        else:
            run = cache.lookup_runs(hashes, token_ids, sequence.root, origins)
            found[index], runs[index] = run
    while end and not all(_reaches(groups[index], runs[index], end) for index in runs):
        end -= stride
    hits = []
    for index, group in enumerate(groups):
        num_null = group.num_null(end)
        hits.append(GroupHit(num_null, found[index][num_null : end // group.block_size]))
    return end, hits


def _reaches(group: KvGroup, runs: list[int], end: int) -> bool:
    """True if the blocks that the token at `end` reads are all there."""
    num_blocks = end // group.block_size
    return runs[num_blocks - 1] >= num_blocks - group.num_null(end)
