"""Tensors that are not read: those that the user names, and those of parts that are not served.

A user names what is no part of the model, such as the value head of a trainer.
"""

import logging
import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from worker_svc.models.weights import KV_SCALE, refuse_ignored, some

log = logging.getLogger(__name__)


def named_by(patterns: Collection[str], names: Iterable[str]) -> frozenset[str]:
    """The names that a pattern of --ignore-weights matches; the log says which.

    Raises UnexpectedWeight for the scale of a KV cache, which is read.
    """
    found: set[str] = set()
    names = sorted(names)
    for pattern in patterns:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        found.update(matched)
        if matched:
            log.warning("ignore_weights: %s: %s is not read", pattern, some(matched))
        else:
            log.warning("ignore_weights: %s matches no tensor", pattern)
    refuse_ignored([name for name in found if KV_SCALE.fullmatch(name)], frozenset(found))
    return frozenset(found)


def of_other_parts(pattern: str, names: Iterable[str]) -> frozenset[str]:
    """The names of parts of a checkpoint that are not served; the log says so."""
    found = frozenset(name for name in names if re.fullmatch(pattern, name))
    if found:
        log.info("weights of other parts of the model are not read: %s", some(sorted(found)))
    return found
