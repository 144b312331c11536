"""Places requests on worker groups, and migrates requests of lost and of drained groups."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_svc.core import Request, Scheduler, Sequence
from scheduler_svc.core.estimate.placement import option_of, preferred, ranking
from scheduler_svc.group import WorkerGroup

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """A group that has had a worker, and its core."""

    group: WorkerGroup
    core: Scheduler


def best_first(places: list[Place], request: Request) -> list[Place]:
    """The groups to try for a new request, best first; a group with its reservation comes first."""
    if len(places) <= 1:
        return places
    reserved = [p for p in places if p.core.intake.reservations.is_due(request.request_id)]
    config = places[0].core.config  # what its blocks are is the same in all groups, see `Served`
    probe = Sequence(
        request,
        0,
        (),
        namespace=config.hash_namespace,
        weights_version=config.weights_version,
    )
    best = ranked(places, probe)
    return [*reserved, *(place for place in best if place not in reserved)]


def ranked(places: list[Place], sequence: Sequence) -> list[Place]:
    """The places for a sequence, best first."""
    if len(places) == 1:
        return places
    options = [option_of(place.core, sequence) for place in places]
    order, request = ranking(options), sequence.request
    if request.session is not None and request.session.placed_by:
        names = [place.group.address for place in places]
        order = preferred(order, options, names, (request.cache_salt, request.session.placed_by))
    best = [places[index] for index in order]
    # Members of a live fork group share a prompt that is, or will be, computed there.
    return sorted(best, key=lambda place: not place.core.view.has_fork_group_of(sequence.request))


def tiers(places: list[Place]) -> list[list[Place]]:
    """The places by where a new request should go: open groups, lost ones, drained ones."""
    is_open, is_lost, is_drained = list[Place](), list[Place](), list[Place]()
    for place in places:
        is_other = is_drained if place.group.why_drained else is_lost
        (is_open if place.group.is_open else is_other).append(place)
    return [is_open, is_lost, is_drained]


def move_all(source: Place, targets: list[Place], now_s: float) -> None:
    """Migrates all requests to the best targets; those that fit nowhere stay in the queue."""
    _advance(source, targets, now_s)
    _move(source, source.core.migration.migrate_out(), targets)


def move_waiting(source: Place, targets: list[Place], now_s: float) -> None:
    """Migrates the waiting requests of a group whose worker goes on, likewise."""
    _advance(source, targets, now_s)
    _move(source, source.core.migration.migrate_waiting(), targets)


def _advance(source: Place, targets: list[Place], now_s: float) -> None:
    for place in (source, *targets):
        place.core.now_s = now_s


def _move(source: Place, leaving: list[Sequence], targets: list[Place]) -> None:
    num_stay = 0
    if not leaving:
        return
    for sequence in _in_order_of_adoption(leaving):
        fitting = [place for place in targets if place.core.migration.can_hold(sequence)]
        place = ranked(fitting, sequence)[0] if fitting else source
        place.core.migration.migrate_in(sequence)
        place.group.wake()
        num_stay += place is source
    logger.info(
        "%d requests move away from worker %s, %d fit nowhere else",
        len(leaving) - num_stay,
        source.group.address,
        num_stay,
    )


def _in_order_of_adoption(leaving: list[Sequence]) -> Iterable[Sequence]:
    """Sequences that have run, last first, since each goes to the front; then new ones."""
    ran = [sequence for sequence in leaving if sequence.has_run]
    yield from reversed(ran)
    yield from (sequence for sequence in leaving if not sequence.has_run)
