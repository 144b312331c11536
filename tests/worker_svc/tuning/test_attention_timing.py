"""Backends are checked before they are timed; one key too many or too few is detected."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.attention_kind import AttentionKind
from tests.worker_svc.flash_attn_stand_in import importer
from worker_svc.attention import flash_attn
from worker_svc.attention.backend import Backend
from worker_svc.attention.batch import HeadLayout
from worker_svc.attention.call import AttentionCall
from worker_svc.attention.flash_attn import Setup
from worker_svc.protocol.step import Limits
from worker_svc.tuning.attention import Unfit
from worker_svc.tuning.attention_timing import Clock, trials

CPU = torch.device("cpu")
HEADS = HeadLayout(num_heads=4, num_kv_heads=2, head_dim=16)


class Reference:
    """A correct backend."""

    name = "reference"

    def serves(self, kind: AttentionKind) -> bool:
        return True

    def prefill(self, call: AttentionCall) -> Tensor:
        q, kv, batch = call.q, call.kv, call.batch
        plan = reference.AttentionPlan.build(
            batch.block_tables, batch.context_lens, batch.cu_seqlens_q, kv.block_size, q.dtype,
            call.kind,
        )  # fmt: skip
        return reference.attend(q, kv.rows, plan, call.kind)

    decode = prefill


def limits(block_size: int, max_model_len: int = 1024) -> Limits:
    return Limits(1, block_size, 64, 512, max_model_len, 8)


def make_clock(block_size: int, window: int | None = None) -> Clock:
    kind = AttentionKind(HEADS.scale, window)
    return Clock(HEADS, kind, torch.float16, CPU, limits(block_size), Reference())


def installed(version: int, block_size: int, **replaced: Callable[..., Any]) -> Backend:
    """The backend of a version, with some functions replaced."""
    load = importer(version)
    module = load({4: "flash_attn.cute", 3: "flash_attn_interface", 2: "flash_attn"}[version])
    for name, function in replaced.items():
        setattr(module, name, function)
    setup = Setup(HEADS.head_dim, torch.float16, block_size, (9, 0))
    (found,) = flash_attn.find(setup, load).backends
    return found


@pytest.mark.parametrize(("version", "block_size"), [(4, 16), (4, 128), (3, 16), (2, 256)])
def test_what_is_right_passes(version: int, block_size: int) -> None:
    make_clock(block_size).check(installed(version, block_size))


@pytest.mark.parametrize(("window", "more"), [(40, 1), (400, 400)])
def test_a_window_that_is_too_long_is_unfit(window: int, more: int) -> None:
    real = importer(3)("flash_attn_interface").flash_attn_with_kvcache

    @functools.wraps(real)
    def wrong(**given: Any) -> Tensor:
        before, after = given["window_size"]
        return real(**given | {"window_size": (before + more, after)})

    clock = make_clock(16, window)
    clock.check(installed(3, 16))
    with pytest.raises(Unfit, match=r"short sequences is .* away from ours"):
        clock.check(installed(3, 16, flash_attn_with_kvcache=wrong))


WRONGS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "one key too few": lambda given: {"cache_seqlens": (given["cache_seqlens"] - 1).clamp(min=0)},
    "no mask": lambda given: {"causal": False},
    "other blocks": lambda given: {"page_table": given["page_table"].flip(1)},
    "other scale": lambda given: {"softmax_scale": 1.0},
}


@pytest.mark.parametrize("name", WRONGS)
def test_what_is_wrong_is_unfit(name: str) -> None:
    real = importer(3)("flash_attn_interface").flash_attn_with_kvcache

    @functools.wraps(real)
    def wrong(**given: Any) -> Tensor:
        return real(**given | WRONGS[name](given))

    with pytest.raises(Unfit, match=r"of 6 short sequences is .* away from ours"):
        make_clock(16).check(installed(3, 16, flash_attn_with_kvcache=wrong))


def test_what_is_not_a_number_is_unfit() -> None:
    @functools.wraps(importer(4)("flash_attn.cute").flash_attn_varlen_func)
    def broken(**given: Any) -> tuple[Tensor, None]:
        return torch.full_like(given["q"], float("nan")), None

    with pytest.raises(Unfit, match="is nan away"):
        make_clock(16).check(installed(4, 16, flash_attn_varlen_func=broken))


def test_trials_are_no_longer_than_the_model_allows() -> None:
    for _, sequences in trials(limits(16, max_model_len=20), 9):
        assert all(queries <= 20 and context <= 20 for context, queries in sequences)
