"""C attention over an FP8 cache: the bytes that are stored, and what is attended to.

With every instruction set what is stored is, byte for byte, the reference's FP8 of what a cache of
the library's own type would hold.
"""

import math

import pytest
import torch
from torch import Tensor

from kernels import fp8, reference
from kernels.cpu import isa
from kernels.cpu.library import Library
from tests.kernels.cpu.cpu_cases import require
from tests.kernels.cpu.test_cpu_attention import BLOCK_SIZE, BOUNDS, SHAPES, Heads, Step

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Each instruction set with one type and both formats, and each type with one instruction set.
PAIRS = [(one.name, torch.bfloat16, kind) for one in isa.available() for kind in (E4M3, E5M2)]
PAIRS += [("plain", torch.float32, E4M3), (isa.available()[0].name, torch.float16, E4M3)]


@pytest.fixture(
    params=PAIRS, ids=lambda p: "-".join(str(x).removeprefix("torch.") for x in p), scope="module"
)
def libraries(request: pytest.FixtureRequest) -> tuple[Library, Library]:
    """The library for a cache in FP8, and that of the same type without."""
    name, dtype, kv_dtype = request.param
    return require(name, dtype, kv_dtype), require(name, dtype)


def make(library: Library, heads: Heads, contexts: list[int], num_new: list[int]) -> Step:
    """A step over an FP8 cache with a scale for each head."""
    step = Step(library.dtype, heads, contexts, num_new)
    random = torch.Generator().manual_seed(7)
    k, v = torch.rand((2, heads.num_kv), generator=random) * 2 + 0.01
    step.kv_scales = fp8.scale_table(k, v)
    step.cache = fp8.narrowed(step.cache, step.kv_scales[2:], library.kv_dtype)
    return step


def as_bytes(cache: Tensor) -> Tensor:
    return cache.view(torch.uint8)


def plain_twin(step: Step, dtype: torch.dtype) -> Step:
    """The same step over what the cache counts as, in float32 precision of the dtype."""
    twin = Step.__new__(Step)
    vars(twin).update(vars(step))
    assert step.kv_scales is not None
    twin.cache = fp8.widened(step.cache, step.kv_scales[:2], dtype)
    twin.kv_scales = twin.key_offsets = None
    return twin


def check(libraries: tuple[Library, Library], step: Step) -> None:
    library, plain = libraries
    assert step.kv_scales is not None
    out, cache = step.run(library)
    _, exact = plain_twin(step, library.dtype).run(plain)
    written = fp8.narrowed(exact[step.slots], step.kv_scales[2:], library.kv_dtype)
    assert torch.equal(as_bytes(cache[step.slots]), as_bytes(written))
    others = torch.ones(len(cache), dtype=torch.bool)
    others[step.slots] = False
    assert torch.equal(as_bytes(cache[others]), as_bytes(step.cache[others]))
    wanted = attended(step, cache)
    distance = (out.double() - wanted.double()).norm()
    assert distance <= BOUNDS[library.dtype] * wanted.double().norm()


def attended(step: Step, cache: Tensor) -> Tensor:
    """Attention by the reference, in float32, of the step's queries to this cache."""
    heads = step.heads
    num_heads = heads.share * heads.num_kv
    qk = step.qkv.float().view(len(step.qkv), -1, heads.dim)[:, : num_heads + heads.num_kv]
    if step.qk_norm is not None:
        qk = reference.rms_norm(qk, step.qk_norm.float(), 1e-5)
    q, k = qk.split((num_heads, heads.num_kv), 1)
    q, _ = reference.rotary_embedding(q, k, step.positions, step.cos_sin)
    k_cache, v_cache = cache.view(-1, BLOCK_SIZE, 2, heads.num_kv, heads.dim).unbind(2)
    longest = int(step.starts.diff().max())
    return reference.paged_attention(
        q, k_cache, v_cache, step.tables, step.lens, step.starts, longest, step.kind,
        step.kv_scales,
    ).flatten(1)  # fmt: skip


@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_single_tokens_and_parts_of_prompts(
    libraries: tuple[Library, Library], heads: Heads
) -> None:
    contexts = [1, BLOCK_SIZE - 1, BLOCK_SIZE, 33, 40, 77, 100]
    check(libraries, make(libraries[0], heads, contexts, [1, 1, 1, 1, 40, 33, 3]))


@pytest.mark.parametrize("dim", [16, 24, 64])
def test_keys_are_stored_less_their_offsets(libraries: tuple[Library, Library], dim: int) -> None:
    library, plain = libraries
    step = make(library, Heads(3, 2, dim, has_norm=True), [40, 33, 9], [1, 33, 9])
    step.key_offsets = torch.randn((2, dim), generator=torch.Generator().manual_seed(3)) * 3
    assert step.kv_scales is not None
    _, cache = step.run(library)
    _, exact = plain_twin(step, library.dtype).run(plain)
    whole = exact[step.slots].float()
    whole[:, 0] -= step.key_offsets
    wanted = fp8.narrowed(whole, step.kv_scales[2:], library.kv_dtype)
    assert torch.equal(as_bytes(cache[step.slots]), as_bytes(wanted))


def test_offsets_of_another_shape_or_for_another_cache_are_refused(
    libraries: tuple[Library, Library],
) -> None:
    library, plain = libraries
    step = make(library, Heads(1, 1, 16, has_norm=False), [3], [3])
    step.key_offsets = torch.zeros(1, 8)
    with pytest.raises(ValueError, match=r"offsets must be contiguous float32 \[1, 16\]"):
        step.run(library)
    own = Step(plain.dtype, Heads(1, 1, 16, has_norm=False), [3], [3])
    own.key_offsets = torch.zeros(1, 16)
    with pytest.raises(TypeError, match="has offsets of keys"):
        own.run(plain)


def test_every_float_is_stored_as_the_reference_stores_it(
    libraries: tuple[Library, Library],
) -> None:
    """Values through the V side, which nothing rotates: powers, ties, neighbours, infinities."""
    library, heads = libraries[0], Heads(1, 1, 64, has_norm=False)
    exponents = torch.arange(-40, 40).float()
    digits = torch.tensor([1.0, 1.0625, 1.125, 1.1875, 1.25, 1.375, 1.5, 1.75, 1.9375, 1.99])
    values = (torch.exp2(exponents)[:, None] * digits).flatten()
    values = torch.cat((values, -values, torch.tensor([0.0, math.inf, -math.inf, math.nan])))
    values = torch.nn.functional.pad(values, (0, -len(values) % 64)).to(library.dtype)
    rows = len(values) // 64
    step = make(library, heads, [rows], [rows])
    step.qkv = torch.cat((torch.zeros(rows, 128, dtype=library.dtype), values.view(-1, 64)), 1)
    _, cache = step.run(library)
    assert step.kv_scales is not None
    found, given = cache[step.slots, 1], values.view(-1, 1, 64)
    wanted = fp8.narrowed(given, step.kv_scales[3], library.kv_dtype)
    is_finite = given.isfinite()
    assert torch.equal(as_bytes(found)[is_finite], as_bytes(wanted)[is_finite])
    assert found.float().isnan()[~is_finite].all()


def test_nan_spreads_to_its_own_sequence_alone(libraries: tuple[Library, Library]) -> None:
    library, heads = libraries[0], Heads(2, 1, 16, has_norm=False)
    step = make(library, heads, [20, 20, 5], [1, 20, 5])
    step.qkv[-1, 3 * 16 - 1] = math.inf  # a key of the last sequence's last token
    out, _ = step.run(library)
    assert out[:-1].isfinite().all()
    assert out[-1].isnan().any()


def test_chunks_give_the_bits_of_the_whole_prompt(libraries: tuple[Library, Library]) -> None:
    """A later chunk reads what was stored, as the whole prompt does."""
    library, heads = libraries[0], Heads(3, 2, 64, has_norm=True)
    whole = make(library, heads, [90], [90])
    together, cache = whole.run(library)
    later = make(library, heads, [90], [90])
    vars(later).update(vars(whole))
    later.cache, later.qkv, later.starts = cache, whole.qkv[50:], torch.tensor([0, 40]).int()
    later.positions, later.slots = whole.positions[50:], whole.slots[50:]
    found, again = later.run(library)
    assert torch.equal(found, together[50:])
    assert torch.equal(as_bytes(again), as_bytes(cache))


def test_a_cache_of_another_type_is_refused(libraries: tuple[Library, Library]) -> None:
    library, plain = libraries
    step = make(library, Heads(1, 1, 16, has_norm=False), [3], [3])
    with pytest.raises(TypeError, match="the library is for"):
        step.run(plain)
    step.kv_scales = None
    with pytest.raises(TypeError, match="has no scales"):
        step.run(library)
