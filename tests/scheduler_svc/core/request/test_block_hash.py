"""Block hashes: fixed values, chained, and equal however they are computed."""

import numpy as np
import pytest
from xxhash import xxh64_intdigest

from scheduler_svc.core.request.block_hash import NO_PARENT, chain, extend, root_of

GOLDEN_TOKENS = np.array([13048, 11, 358, 2776, 595, 2143, 88, 10386], dtype=np.int32)
GOLDEN_HASHES = [17248703474756886913, 1090572622844872466]


def test_hashes_are_those_of_the_published_vectors() -> None:
    assert chain(GOLDEN_TOKENS, block_size=4) == GOLDEN_HASHES


def test_a_chain_can_be_continued_from_its_last_hash() -> None:
    assert chain(GOLDEN_TOKENS[4:], 4, parent=GOLDEN_HASHES[0]) == GOLDEN_HASHES[1:]


def test_the_last_tokens_of_no_full_block_are_not_hashed() -> None:
    assert chain(GOLDEN_TOKENS[:7], 4) == GOLDEN_HASHES[:1]
    assert chain(GOLDEN_TOKENS[:3], 4) == []


def test_equal_content_after_another_prefix_hashes_differently() -> None:
    after_a = chain(np.array([1, 2, 7, 7], dtype=np.int32), 2)
    after_b = chain(np.array([1, 3, 7, 7], dtype=np.int32), 2)
    assert after_a[1] != after_b[1]
    assert after_a[1] != chain(np.array([7, 7], dtype=np.int32), 2)[0]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_the_array_type_does_not_matter(dtype: type[np.integer]) -> None:
    assert chain(GOLDEN_TOKENS.astype(dtype), 4) == GOLDEN_HASHES


def test_a_hash_is_over_little_endian_bytes_on_every_machine() -> None:
    content = b"".join(int(token).to_bytes(8, "little") for token in GOLDEN_TOKENS[:4])
    assert chain(GOLDEN_TOKENS[:4], 4) == [xxh64_intdigest(content)]


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_many_next_blocks_at_once_hash_like_one_chain_each(block_size: int) -> None:
    rng = np.random.default_rng(block_size)
    prompts = rng.integers(0, 150_000, size=(9, 2 * block_size)).astype(np.int32)
    expected = [chain(prompt, block_size) for prompt in prompts]
    parents = np.array([hashes[0] for hashes in expected], dtype=np.uint64)
    assert extend(parents, prompts[:, block_size:]) == [hashes[1] for hashes in expected]


def test_chains_of_different_salts_or_types_of_cache_share_no_hashes() -> None:
    assert root_of("") == root_of("", "") == NO_PARENT
    roots = [
        root_of(salt, kind) for salt in ("", "a", "fp8_e4m3") for kind in ("", "a", "fp8_e4m3")
    ]
    assert len(set(roots)) == 9
    chains = [chain(GOLDEN_TOKENS, 4, root or None) for root in roots]
    assert len({block_hash for hashes in chains for block_hash in hashes}) == 18
