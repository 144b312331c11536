# mypy: disable-error-code="untyped-decorator"
"""Routing: which experts a row has, with which weights, and which rows an expert has.

    x [T, h], weight [E, h]  ->  logits [T, E] float32
    logits [T, E]            ->  Routing

All of it stays on the device: a graph holds any routing of its number of rows. Products and scores
are float32. Of equal scores the expert with the smaller index is chosen. Experts that every row has
come after those that are chosen among, and after a row's chosen ones.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.norm.rms_norm import rms_norm
from kernels.pdl import has_pdl, launch_options

_MAX_HIDDEN = 8192  # of a row that a program has in registers
_MOST_BY_ROW = 32  # rows of which each has programs of its own
_TILE = 8192  # elements of the router that such a program reads, unless a row has more
_BLOCK_M, _BLOCK_E = 32, 64  # rows and experts of a tile, for more rows


@dataclass(frozen=True, slots=True)
class Router:
    """The weight of a router, and the rule by which it chooses: see `reference.choose_experts`."""

    weight: torch.Tensor  # [E, h], and one more row where `gates_shared`
    top_k: int  # experts that are chosen for a row
    renormalizes: bool  # the weights of a row's chosen experts are divided by their sum
    bias: torch.Tensor | None = None  # [E] float32 that scores are chosen with; None: none
    is_sigmoid: bool = False  # scores are sigmoids of the logits; else a softmax
    scale: float = 1.0  # of the chosen experts' weights
    num_shared: int = 0  # experts of every row
    gates_shared: bool = False  # their weight is the sigmoid of the last logit; else it is 1
    logit_bias: torch.Tensor | None = None  # [E] float32, of the choices' logits; None: none
    epsilon: float = 1e-20  # that is added to the sum
    num_groups: int = 1  # of consecutive experts
    kept_groups: int = 1  # those of them that a row chooses from; as many: all

    @property
    def num_choices(self) -> int:
        """The experts that are chosen among."""
        return len(self.weight) - self.gates_shared

    @property
    def per_row(self) -> int:
        """The number of experts of a row."""
        return self.top_k + self.num_shared

    @property
    def has_groups(self) -> bool:
        """True if a row chooses from some groups of experts."""
        return self.kept_groups < self.num_groups

    def check(self, x: torch.Tensor) -> None:
        """Raises ValueError or TypeError if it cannot route rows x [T, h]."""
        hidden = self.weight.shape[1]
        if not 0 < self.top_k <= self.num_choices:
            raise ValueError(f"top_k: {self.top_k} of {self.num_choices} experts")
        size, rest = divmod(self.num_choices, self.num_groups)
        if self.has_groups and (rest or size < 2 or self.kept_groups * size < self.top_k):
            raise ValueError(
                f"{self.top_k} of {self.num_choices} experts, of {self.kept_groups} of "
                f"{self.num_groups} groups"
            )
        if x.shape[1] != hidden or x.stride(1) != 1 or not self.weight.is_contiguous():
            raise ValueError(f"x must be [T, {hidden}], router contiguous, got {tuple(x.shape)}")
        if self.weight.dtype != x.dtype:
            raise TypeError(f"x is {x.dtype}, router is {self.weight.dtype}")
        for bias in (self.bias, self.logit_bias):
            if bias is not None and bias.shape != (self.num_choices,):
                raise ValueError(f"bias {tuple(bias.shape)} for {self.num_choices} experts")


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of each row, and the rows of each expert. A pair is row * per_row + place."""

    experts: torch.Tensor  # [T, per_row] int32; largest weight first, then those of every row
    weights: torch.Tensor  # [T, per_row] float32
    counts: torch.Tensor  # [E] int32: the number of rows of each expert
    pairs: torch.Tensor  # [E, T] int32: those of each expert in any order, `counts` of them

    @property
    def per_row(self) -> int:
        """Experts of a row."""
        return self.experts.shape[1]

    @property
    def num_pairs(self) -> int:
        """Rows times experts of a row."""
        return self.experts.numel()


def route(
    x: torch.Tensor, router: Router, norm_weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, Routing]:
    """(x, or with `norm_weight` its RMS norm; the routing of that)."""
    router.check(x)
    num_experts = router.num_choices + router.num_shared
    counts = torch.empty(num_experts, dtype=torch.int32, device=x.device)
    normed, logits = _logits(x, router.weight, norm_weight, eps, counts)
    return normed, _chosen(logits, counts, router)


def _logits(
    x: torch.Tensor,
    router: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the norm of x, logits); also clears `counts`."""
    (num_rows, hidden), num_logits = x.shape, len(router)
    logits = torch.empty((num_rows, num_logits), dtype=torch.float32, device=x.device)
    common = dict(
        E=num_logits,
        H=hidden,
        COUNTS=len(counts),
        BLOCK_COUNTS=triton.next_power_of_2(len(counts)),
        PDL=has_pdl(x),
        num_warps=4,
        **launch_options(x),
    )
    if num_rows <= _MOST_BY_ROW and hidden <= _MAX_HIDDEN:
        normed = x if norm_weight is None else x.new_empty((num_rows, hidden))
        block = triton.next_power_of_2(hidden)
        block_e = max(1, min(_TILE // block, triton.next_power_of_2(num_logits)))
        _row_logits_kernel[(triton.cdiv(num_logits, block_e), num_rows)](
            x, router, norm_weight, normed, logits, counts, eps, x.stride(0),
            BLOCK_E=block_e, BLOCK_H=block, NORM=norm_weight is not None, **common,
        )  # fmt: skip
        return normed, logits
    normed = x if norm_weight is None else rms_norm(x, norm_weight, eps)
    tiles = triton.cdiv(num_rows, _BLOCK_M), triton.cdiv(num_logits, _BLOCK_E)
    _tile_logits_kernel[tiles](
        normed, router, logits, counts, num_rows, normed.stride(0),
        BLOCK_M=_BLOCK_M, BLOCK_E=_BLOCK_E, BLOCK_H=256 // x.element_size(), **common,
    )  # fmt: skip
    return normed, logits


def _chosen(logits: torch.Tensor, counts: torch.Tensor, router: Router) -> Routing:
    (num_rows, num_logits), device = logits.shape, logits.device
    per_row = router.per_row
    experts = torch.empty((num_rows, per_row), dtype=torch.int32, device=device)
    weights = torch.empty((num_rows, per_row), dtype=torch.float32, device=device)
    pairs = torch.empty((len(counts), num_rows), dtype=torch.int32, device=device)
    groups, kept = (router.num_groups, router.kept_groups) if router.has_groups else (1, 1)
    of_group = triton.next_power_of_2(router.num_choices // groups)
    block_e = triton.next_power_of_2(groups) * of_group
    _choose_kernel[(num_rows,)](
        logits, router.bias, router.logit_bias, experts, weights, counts, pairs, num_rows,
        router.scale,
        E=router.num_choices,
        LOGITS=num_logits,
        TOP_K=router.top_k,
        SHARED=router.num_shared,
        GROUPS=groups,
        KEPT=kept,
        BLOCK_E=block_e,
        BLOCK_S=of_group,
        BLOCK_K=triton.next_power_of_2(per_row),
        RENORMALIZES=router.renormalizes,
        IS_SIGMOID=router.is_sigmoid,
        HAS_BIAS=router.bias is not None,
        HAS_LOGIT_BIAS=router.logit_bias is not None,
        GATES_SHARED=router.gates_shared,
        EPSILON=router.epsilon,
        PDL=has_pdl(logits),
        num_warps=max(1, block_e // 256),
        **launch_options(logits),
    )  # fmt: skip
    return Routing(experts, weights, counts, pairs)


@triton.jit
def _row_logits_kernel(
    x_ptr: tl.tensor,
    router_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    eps: tl.tensor,
    stride_x: tl.tensor,
    E: tl.constexpr,
    H: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NORM: tl.constexpr,
    COUNTS: tl.constexpr,
    BLOCK_COUNTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Some experts' logits of one row, which every program of the row norms for itself."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
    e = tile * BLOCK_E + tl.arange(0, BLOCK_E)
    h = tl.arange(0, BLOCK_H)
    is_e, is_h = e < E, h < H
    w = tl.load(
        router_ptr + e[:, None] * H + h[None, :], mask=is_e[:, None] & is_h[None, :], other=0.0
    )
    if NORM:
        scale = tl.load(norm_ptr + h, mask=is_h, other=0.0)
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + row * stride_x + h, mask=is_h, other=0.0)
    if NORM:
        xf = x.to(tl.float32)
        x = (xf * tl.rsqrt(tl.sum(xf * xf, 0) / H + eps)).to(x.dtype) * scale
        if tile == 0:
            tl.store(normed_ptr + row * H + h, x, mask=is_h)
    logits = tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], 1)
    tl.store(logits_ptr + row * E + e, logits, mask=is_e)
    if tile + row == 0:
        c = tl.arange(0, BLOCK_COUNTS)
        tl.store(counts_ptr + c, tl.zeros([BLOCK_COUNTS], tl.int32), mask=c < COUNTS)


@triton.jit(do_not_specialize=["T"])  # one kernel for all numbers of rows
def _tile_logits_kernel(
    x_ptr: tl.tensor,
    router_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    T: tl.tensor,
    stride_x: tl.tensor,
    E: tl.constexpr,
    H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    COUNTS: tl.constexpr,
    BLOCK_COUNTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Some experts' logits of some rows."""
    if PDL:
        gdc_launch_dependents()
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    h = tl.arange(0, BLOCK_H)
    # Rows and experts beyond the last repeat it and are not stored.
    x_ptrs = x_ptr + tl.minimum(m, T - 1).to(tl.int64)[:, None] * stride_x + h[None, :]
    w_ptrs = router_ptr + tl.minimum(e, E - 1)[None, :] * H + h[:, None]
    if PDL:
        gdc_wait()
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    for h0 in tl.range(0, H, BLOCK_H, num_stages=3):
        is_h = h0 + h < H
        x = tl.load(x_ptrs + h0, mask=is_h[None, :], other=0.0)
        w = tl.load(w_ptrs + h0, mask=is_h[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    inside = (m < T)[:, None] & (e < E)[None, :]
    tl.store(logits_ptr + m.to(tl.int64)[:, None] * E + e[None, :], acc, mask=inside)
    if tl.program_id(0) + tl.program_id(1) == 0:
        c = tl.arange(0, BLOCK_COUNTS)
        tl.store(counts_ptr + c, tl.zeros([BLOCK_COUNTS], tl.int32), mask=c < COUNTS)


@triton.jit
def _of_best_groups(
    key: tl.tensor,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> tl.tensor:
    """The keys of experts, -inf outside of the groups whose two largest add up to the most."""
    BLOCK_G: tl.constexpr = BLOCK_E // BLOCK_S
    by_group = tl.reshape(key, [BLOCK_G, BLOCK_S])
    group, place = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_S)[None, :]
    best = tl.max(by_group, 1)
    first = tl.min(tl.where(by_group == best[:, None], place, BLOCK_S), 1)
    second = tl.max(tl.where(place == first[:, None], float("-inf"), by_group), 1)
    # The sum of two keys that are no numbers may not be that of a group that is not there.
    score = tl.where(group < GROUPS, tl.maximum(best + second, -3.0e38), float("-inf"))
    is_kept = tl.zeros([BLOCK_G], tl.int32)
    for _ in tl.static_range(KEPT):
        index = tl.min(tl.where(score == tl.max(score, 0), group, BLOCK_G), 0)
        is_kept = tl.where(group == index, 1, is_kept)
        score = tl.where(group == index, float("-inf"), score)
    return tl.reshape(tl.where(is_kept[:, None] > 0, by_group, float("-inf")), [BLOCK_E])


@triton.jit(do_not_specialize=["T", "scale"])
def _choose_kernel(
    logits_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    logit_bias_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    T: tl.tensor,
    scale: tl.tensor,
    E: tl.constexpr,
    LOGITS: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    GROUPS: tl.constexpr,  # of experts; 1: a row chooses from all
    KEPT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr,  # of these a group's
    BLOCK_K: tl.constexpr,
    RENORMALIZES: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LOGIT_BIAS: tl.constexpr,
    GATES_SHARED: tl.constexpr,
    EPSILON: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One row's experts; the row takes a place among the rows of each."""
    row = tl.program_id(0)
    e, place = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    is_e = e < E
    if GROUPS > 1:  # which begin at multiples of a power of two
        SIZE: tl.constexpr = E // GROUPS
        is_e = (e // BLOCK_S < GROUPS) & (e % BLOCK_S < SIZE)
        e = tl.where(is_e, e // BLOCK_S * SIZE + e % BLOCK_S, BLOCK_E)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + e, mask=is_e, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    z = tl.load(logits_ptr + row.to(tl.int64) * LOGITS + e, mask=is_e, other=0.0)
    if HAS_LOGIT_BIAS:
        z += tl.load(logit_bias_ptr + e, mask=is_e, other=0.0)
    if IS_SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-z))
    else:
        exponent = tl.exp(z - tl.max(tl.where(is_e, z, float("-inf")), 0))
        score = exponent / tl.sum(tl.where(is_e, exponent, 0.0), 0)
    # A softmax is in the order of its logits, of which fewer are equal.
    key = score if IS_SIGMOID else z
    if HAS_BIAS:
        key = score + bias
    # Rows of padding may hold anything. What is no number comes last, but before an expert that
    # is chosen already: no row may have an expert twice, nor one that is not there.
    key = tl.where(key == key, tl.maximum(key, -3.0e38), -3.0e38)
    key = tl.where(is_e, key, float("-inf"))
    if GROUPS > 1:
        key = _of_best_groups(key, GROUPS, KEPT, BLOCK_E, BLOCK_S)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    weight = tl.zeros([BLOCK_K], tl.float32)
    for i in tl.static_range(TOP_K):
        index = tl.min(tl.where(key == tl.max(key, 0), e, BLOCK_E), 0)
        chosen = tl.where(place == i, index, chosen)
        weight = tl.where(place == i, tl.sum(tl.where(e == index, score, 0.0), 0), weight)
        key = tl.where(e == index, float("-inf"), key)
    if RENORMALIZES:
        weight /= tl.sum(weight, 0) + EPSILON
    weight *= scale
    if SHARED > 0:
        of_every_row = 1.0
        if GATES_SHARED:
            gate = tl.load(logits_ptr + row.to(tl.int64) * LOGITS + E)
            of_every_row = 1.0 / (1.0 + tl.exp(-gate))
        chosen = tl.where(place < TOP_K, chosen, E + place - TOP_K)
        weight = tl.where(place < TOP_K, weight, of_every_row)
    pair, is_place = row * (TOP_K + SHARED) + place, place < TOP_K + SHARED
    tl.store(experts_ptr + pair, chosen, mask=is_place)
    tl.store(weights_ptr + pair, weight, mask=is_place)
    rank = tl.atomic_add(counts_ptr + chosen, 1, mask=is_place, sem="relaxed")
    tl.store(pairs_ptr + chosen * T + rank, pair, mask=is_place)
