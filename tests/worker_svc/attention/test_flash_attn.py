"""flash-attn's calls, against a stand-in of what they are documented to do; what is refused."""

import functools
from dataclasses import replace

import pytest
import torch

from kernels.attention_kind import AttentionKind
from tests.worker_svc.flash_attn_stand_in import importer
from tests.worker_svc.paged_batches import PagedBatch, assert_close
from worker_svc.attention import flash_attn
from worker_svc.attention.batch import HeadLayout
from worker_svc.attention.flash_attn import FlashAttention, Setup

CPU = torch.device("cpu")
HEADS = HeadLayout(num_heads=6, num_kv_heads=2, head_dim=16)
HOPPER = Setup(head_dim=16, dtype=torch.float16, block_size=16, capability=(9, 0))
KIND = AttentionKind(0.25)
WINDOW, CAPPED = replace(KIND, window=9), replace(KIND, softcap=3.0, window=70)
VERSIONS = {4: 16, 3: 16, 2: 256}  # the block size each is tried with
PROMPTS = {  # (context, queries) of each sequence
    "whole prompts": [(100, 100), (1, 1), (33, 33)],
    "chunks over a cached context": [(290, 17), (160, 64), (65, 2)],
    "decodes among chunks": [(77, 1), (70, 40), (16, 1), (129, 129)],
    "padding and idle sequences": [(0, 1), (40, 0), (40, 8), (0, 0)],
}
DECODES = [(0, 1), (1, 1), (15, 1), (16, 1), (17, 1), (300, 1)]


def only(version: int, **changes: object) -> FlashAttention:
    """The backend where just this version is installed."""
    setup = replace(HOPPER, block_size=VERSIONS[version])
    found = flash_attn.find(replace(setup, **changes), importer(version))
    assert [backend.name for backend in found.backends] == [f"flash-attn {version}"]
    return found.backends[0]


def refusals(*versions: int, **changes: object) -> str:
    """Why none of these versions serves such a setup."""
    found = flash_attn.find(replace(HOPPER, **changes), importer(*versions))
    assert not found.backends
    return "; ".join(found.refusals)


@pytest.mark.parametrize("version", VERSIONS)
def test_each_row_of_a_decode_step_attends_to_exactly_its_context(version: int) -> None:
    made = PagedBatch.make(DECODES, HEADS, VERSIONS[version], torch.float16, CPU)
    # As in a graph, whose batch has no starts.
    batch = replace(made.batch, cu_seqlens_q=made.batch.context_lens)
    found = only(version).decode(replace(made.call(KIND), batch=batch))
    assert_close(found, made.expected(KIND))


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_last_query_of_a_prompt_sees_the_last_key(version: int, name: str) -> None:
    made = PagedBatch.make(PROMPTS[name], HEADS, VERSIONS[version], torch.float16, CPU)
    found = only(version).prefill(made.call(KIND))
    assert_close(found, made.expected(KIND))


@pytest.mark.parametrize("kind", [WINDOW, CAPPED], ids=str)
@pytest.mark.parametrize("version", VERSIONS)
def test_windows_and_softcaps(version: int, kind: AttentionKind) -> None:
    backend = only(version)
    assert backend.serves(kind)
    made = PagedBatch.make(DECODES, HEADS, VERSIONS[version], torch.float16, CPU)
    assert_close(backend.decode(made.call(kind)), made.expected(kind))
    for name in PROMPTS:
        made = PagedBatch.make(PROMPTS[name], HEADS, VERSIONS[version], torch.float16, CPU)
        assert_close(backend.prefill(made.call(kind)), made.expected(kind))


def test_kinds_of_layers_that_a_version_does_not_serve_go_to_another_backend() -> None:
    backend = only(3)
    assert not backend.serves(replace(KIND, has_sinks=True))
    assert not backend.serves(replace(KIND, chunk=8))
    load = importer(3)
    real = load("flash_attn_interface").flash_attn_with_kvcache

    def old(q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q,
            softmax_scale, causal, window_size):  # fmt: skip
        return real(q, k_cache, v_cache)

    load("flash_attn_interface").flash_attn_with_kvcache = old
    (backend,) = flash_attn.find(HOPPER, load).backends
    assert backend.serves(WINDOW)
    assert not backend.serves(CAPPED)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_part_of_a_mixed_step_lands_in_its_rows(version: int) -> None:
    made = PagedBatch.make([(40, 8), (20, 20)], HEADS, VERSIONS[version], torch.float16, CPU)
    out = torch.zeros(30, *made.q.shape[1:], dtype=torch.float16)
    only(version).prefill(made.call(KIND, out[2:]))
    assert_close(out[2:], made.expected(KIND))
    assert not out[:2].any()


def test_the_starts_of_version_2_are_of_the_step_at_hand() -> None:
    backend = only(2)
    for sequences in ([(100, 7), (9, 9)], [(9, 3), (100, 2)]):
        made = PagedBatch.make(sequences, HEADS, 256, torch.float16, CPU)
        for _ in range(2):  # two layers
            found = backend.prefill(made.call(KIND))
            assert_close(found, made.expected(KIND))


def test_the_newest_version_comes_first_and_none_is_needed() -> None:
    setup = replace(HOPPER, block_size=256)
    found = flash_attn.find(setup, importer(2, 3, 4))
    assert [backend.version for backend in found.backends] == [4, 3, 2]
    assert not found.refusals
    nothing = flash_attn.find(setup, importer())
    assert not nothing.backends
    assert nothing.refusals == tuple(f"flash-attn {v}: not installed" for v in (4, 3, 2))


def test_what_a_version_cannot_is_refused_by_its_name_and_number() -> None:
    assert "2: block_size 16 is no multiple of 256" in refusals(2)
    assert "4: dtype float32 is neither float16 nor bfloat16" in refusals(4, dtype=torch.float32)
    assert "3: heads of 512: want a multiple of 8, at most 256" in refusals(3, head_dim=512)
    assert "4: heads of 192: want at most 128, or 256" in refusals(
        4, head_dim=192, capability=(10, 0)
    )
    assert "3: a KV cache of float8_e4m3fn, ours alone widen it" in refusals(
        3, kv_dtype=torch.float8_e4m3fn
    )
    ampere = refusals(3, 4, capability=(8, 0))
    assert "4: it needs compute capability 9.x to 11.x, the device has 8.0" in ampere
    assert "3: it needs compute capability 9.x, the device has 8.0" in ampere
    assert "2: it needs compute capability 8.x or later, the device has 7.5" in refusals(
        2, block_size=256, capability=(7, 5)
    )


@pytest.mark.parametrize(("major", "splits"), [(9, [1, 1]), (10, [0, 1])])
def test_version_4_may_split_decodes_on_blackwell_alone(major: int, splits: list[int]) -> None:
    load, seen = importer(4), []
    real = load("flash_attn.cute").flash_attn_varlen_func

    @functools.wraps(real)
    def watched(**arguments: object) -> object:
        seen.append(arguments["num_splits"])
        return real(**arguments)

    load("flash_attn.cute").flash_attn_varlen_func = watched
    (backend,) = flash_attn.find(replace(HOPPER, capability=(major, 0)), load).backends
    made = PagedBatch.make([(5, 1)], HEADS, 16, torch.float16, CPU)
    backend.decode(made.call(KIND))
    backend.prefill(made.call(KIND))
    assert seen == splits


def test_a_library_that_cannot_be_imported_is_left_out_with_its_own_words() -> None:
    broken = {
        "flash_attn.cute": ModuleNotFoundError("No module named 'cutlass'", name="cutlass"),
        "flash_attn_interface": OSError("undefined symbol: _ZN3c10"),
    }
    found = flash_attn.find(HOPPER, importer(broken=broken))
    assert not found.backends
    assert "flash_attn.cute cannot be imported: No module named 'cutlass'" in found.refusals[0]
    assert "flash_attn_interface cannot be imported: undefined symbol" in found.refusals[1]


def test_an_older_release_whose_call_lacks_a_parameter_is_left_out() -> None:
    load = importer(4)

    def old(q, k, v, cu_seqlens_q, max_seqlen_q, seqused_k, softmax_scale, causal):
        raise AssertionError

    load("flash_attn.cute").flash_attn_varlen_func = old
    found = flash_attn.find(HOPPER, load)
    assert not found.backends
    assert "flash_attn_varlen_func takes no page_table, num_splits" in found.refusals[0]
