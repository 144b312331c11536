"""Which backend attends: the one that was named, or the quickest of those that are there.

Candidates are known before the weights are read, so that what cannot be is refused at once. They
are measured once the device is otherwise idle, each kind of step by itself. Rank 0's clock decides
for all ranks.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from worker_svc import flash_attention
from worker_svc.attention import fuses
from worker_svc.attention_backend import KINDS, AttentionChoice, AttentionTiming, Backend
from worker_svc.flash_attention import InstalledVersions, Setup
from worker_svc.parallel import Group

log = logging.getLogger(__name__)

# Less is the measurement's own scatter, and a start should choose as the one before it did.
WORTHWHILE = 0.03

Measure = Callable[[Backend], list[AttentionTiming]]  # all shapes of both kinds; raises Unfit
Find = Callable[[Setup], InstalledVersions]


class Unfit(RuntimeError):
    """A backend that is installed and does not do what it must."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """What may be chosen from."""

    flash: tuple[Backend, ...] = ()
    has_triton: bool = True


def candidates(
    option: str,
    device: torch.device,
    head_dim: int,
    setup: Callable[[], Setup],
    find: Find = flash_attention.find,
) -> Candidates:
    """What `--attention-backend` allows, of what is there.

    Raises ValueError for what was named and cannot be. `setup` is asked for on CUDA only.
    """
    if option != "auto" and device.type != "cuda":
        raise ValueError(f"attention_backend: {option} needs device cuda, this is {device.type}")
    if option != "auto" and not fuses(head_dim):
        raise ValueError(
            f"attention_backend: {option} needs heads of a power of 2 from 16 on, these are of "
            f"{head_dim}"
        )
    if option == "triton" or device.type != "cuda" or not fuses(head_dim):
        return Candidates()
    found = find(setup())
    if option == "flash-attn" and not found.backends:
        raise ValueError("attention_backend: flash-attn cannot serve: " + "; ".join(found.refusals))
    log.info("attention backends that cannot serve: %s", "; ".join(found.refusals) or "none")
    return Candidates(found.backends, has_triton=option == "auto")


def choose(
    triton: Backend, candidates: Candidates, measure: Callable[[], Measure], group: Group
) -> AttentionChoice:
    """The backend for each kind of step; Triton's alone is not measured.

    Raises Unfit if nothing that was asked for works.
    """
    if not candidates.flash:
        return AttentionChoice(triton, triton)
    offered = [triton, *candidates.flash] if candidates.has_triton else [*candidates.flash]
    timings = group.together(lambda: measure_all(offered, measure()))
    votes = [partial(_vote, group, offered, timings, kind) for kind in KINDS]
    chosen = [offered[group.smallest(vote)] for vote in votes]
    group.together(partial(_require, chosen, timings))
    choice = AttentionChoice(chosen[0], chosen[1], tuple(timings))
    log.info("attention backend %s", choice.name)
    return choice


def measure_all(offered: Sequence[Backend], measure: Measure) -> list[AttentionTiming]:
    """What each backend that works took; raises Unfit if none does."""
    timings: list[AttentionTiming] = []
    problems = []
    for backend in offered:
        try:
            timings += measure(backend)
        except Exception as error:  # a library that is not ours may fail in any way
            problems.append(f"{backend.name}: {error}")
            log.warning("attention backend %s is left out: %s", backend.name, error)
    if not timings:
        raise Unfit("attention_backend: none works: " + "; ".join(problems))
    for timing in timings:
        log.info("%s of %s by %s: %.1f us", timing.kind, timing.shape, timing.backend, timing.us)
    return timings


def quickest(names: Sequence[str], timings: Sequence[AttentionTiming], kind: str) -> str:
    """The backend whose times are the least, every shape weighing the same.

    One that is named earlier stays unless a later one is quicker by more than `WORTHWHILE`.
    """
    means = {}
    for name in names:
        logs = [math.log(t.us) for t in timings if (t.kind, t.backend) == (kind, name)]
        if logs:
            means[name] = sum(logs) / len(logs)
    best, *others = means
    for name in others:
        if means[name] < means[best] + math.log(1 - WORTHWHILE):
            best = name
    return best


def _vote(
    group: Group, offered: Sequence[Backend], timings: Sequence[AttentionTiming], kind: str
) -> int:
    """Rank 0: which it takes. Others: a number that is never the smallest."""
    if group.rank > 0:
        return len(offered)
    names = [backend.name for backend in offered]
    return names.index(quickest(names, timings, kind))


def _require(chosen: Sequence[Backend], timings: Sequence[AttentionTiming]) -> None:
    """Raises Unfit if what rank 0 has chosen failed on this rank."""
    for backend in chosen:
        if backend.name not in {timing.backend for timing in timings}:
            raise Unfit(f"attention_backend: {backend.name} works on rank 0 and not here")
