"""Chooses the attention backend: the configured one, or the fastest installed one.

Candidates are determined before the weights are read, so that an invalid option is refused early.
They are timed once the device is otherwise idle, separately for decode and prefill. Rank 0's times
decide for all ranks.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean

import torch

from kernels.attention_kind import AttentionKind
from worker_svc.attention import flash_attn
from worker_svc.attention.backend import (
    KINDS,
    AttentionChoice,
    AttentionTiming,
    Backend,
    GraphBackend,
)
from worker_svc.attention.batch import fuses
from worker_svc.attention.flash_attn import InstalledVersions, Setup
from worker_svc.config import UnsupportedOption
from worker_svc.parallel.group import Group
from worker_svc.tuning.stopwatch import vote

log = logging.getLogger(__name__)

# Smaller differences are noise; a restart should repeat the choice.
WORTHWHILE = 0.03

Measure = Callable[[Backend], list[AttentionTiming]]  # times all shapes; raises Unfit
Find = Callable[[Setup], InstalledVersions]


class Unfit(RuntimeError):
    """An installed backend fails or computes wrong results."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The attention backends to choose from."""

    flash: tuple[Backend, ...] = ()
    has_triton: bool = True


def candidates(
    option: str,
    device: torch.device,
    head_dim: int,
    setup: Callable[[], Setup],
    find: Find = flash_attn.find,
) -> Candidates:
    """Installed backends that `--attention-backend` allows.

    Raises UnsupportedOption if the configured one cannot be used. `setup` is called on CUDA only.
    """
    if option != "auto" and device.type != "cuda":
        raise UnsupportedOption(
            f"attention_backend: {option} needs device cuda, this is {device.type}"
        )
    if option != "auto" and not fuses(head_dim):
        raise UnsupportedOption(
            f"attention_backend: {option} needs a head_dim that is a power of 2 and at least "
            f"16, not {head_dim}"
        )
    if option == "triton" or device.type != "cuda" or not fuses(head_dim):
        return Candidates()
    found = find(setup())
    if option == "flash-attn" and not found.backends:
        raise UnsupportedOption(
            "attention_backend: flash-attn cannot be used: " + "; ".join(found.refusals)
        )
    log.info("attention backends that cannot be used: %s", "; ".join(found.refusals) or "none")
    return Candidates(found.backends, has_triton=option == "auto")


def choose(
    kind: AttentionKind,
    triton: GraphBackend,
    candidates: Candidates,
    measure: Callable[[], Measure],
    group: Group,
) -> AttentionChoice:
    """Chooses a backend of these layers for decode and for prefill; Triton alone is not timed.

    Candidates that do not serve the kind are passed over. Raises Unfit if none of the others works.
    """
    serving = [backend for backend in candidates.flash if backend.serves(kind)]
    passed = [backend.name for backend in candidates.flash if backend not in serving]
    if passed:
        log.info("attention of layers with %s: not by %s", kind, ", ".join(passed))
    if not serving:
        return AttentionChoice(triton, triton, triton)
    offered = [triton, *serving] if candidates.has_triton else serving
    timings = group.together(lambda: measure_all(offered, measure()))
    names = [backend.name for backend in offered]
    votes = [partial(quickest, names, timings, kind) for kind in KINDS]
    chosen = [offered[names.index(group.of_first(each))] for each in votes]
    group.together(partial(_require, chosen, timings))
    choice = AttentionChoice(chosen[0], chosen[1], triton, tuple(timings))
    log.info("attention backend of layers with %s: %s", kind, choice.name)
    return choice


def measure_all(offered: Sequence[Backend], measure: Measure) -> list[AttentionTiming]:
    """Timings of all backends that work. Raises Unfit if none does."""
    timings: list[AttentionTiming] = []
    problems = []
    for backend in offered:
        try:
            timings += measure(backend)
        except Exception as error:  # an external library may fail in any way
            problems.append(f"{backend.name}: {error}")
            log.warning("attention backend %s is left out: %s", backend.name, error)
    if not timings:
        raise Unfit("attention_backend: none works: " + "; ".join(problems))
    for timing in timings:
        log.info("%s of %s by %s: %.1f us", timing.kind, timing.shape, timing.backend, timing.us)
    return timings


def quickest(names: Sequence[str], timings: Sequence[AttentionTiming], kind: str) -> str:
    """Name of the backend with the smallest geometric mean of times over the shapes of a kind.

    A backend earlier in `names` is preferred unless a later one is faster by more than
    `WORTHWHILE`.
    """
    means = {}
    for name in names:
        times_us = [t.us for t in timings if (t.kind, t.backend) == (kind, name)]
        if times_us:
            means[name] = geometric_mean(times_us)
    return list(means)[vote(list(means.values()), WORTHWHILE)]


def _require(chosen: Sequence[Backend], timings: Sequence[AttentionTiming]) -> None:
    """Raises Unfit if a backend chosen by rank 0 failed on this rank."""
    for backend in chosen:
        if backend.name not in {timing.backend for timing in timings}:
            raise Unfit(f"attention_backend: {backend.name} works on rank 0 and not here")
