"""Versions of the protocols between services, and the one rule for them.

A message may gain fields at any time: a reader ignores what it does not know. A major version
changes what is known already; a peer with another one is refused by name. A minor version says what
a peer understands beyond its major one; both sides keep to the smaller number.
"""

from collections.abc import Sequence

STEP_MAJOR = 2  # of the step stream, between scheduler and worker: Hello.protocol_version
# Hello.protocol_minor, WorkerDescription.protocol_minor. From 2 on frames are sealed, and a row can
# be refused alone, which an earlier scheduler reads as a row that failed.
STEP_MINOR = 8
MINOR_WITH_DRAIN = 1  # from here on heartbeats say that the worker drains
MINOR_WITH_KV_GROUPS = 3  # from here on a scheduler has a block table for each of kv_groups
# From here on a scheduler ends the drafts of a row before a snapshot of its states is due.
MINOR_WITH_DRAFTS_OF_STATES = 4
HOST_TIER = "host"  # KvTier.name: memory of the worker's host
MINOR_WITH_TIERS = 5  # from here on blocks are fetched from tiers, and stored there
MINOR_WITH_ADAPTERS = 6  # from here on adapters are prepared, by PrepareAdapters
MINOR_WITH_PEERS = 7  # from here on blocks are fetched from other workers
DISK_TIER = "disk"  # KvTier.name: files of the worker's host
MINOR_WITH_DISK = 8  # from here on tiers tell what they hold, and are told what to drop
SESSION_MAJOR = 1  # of the stream between gateway and scheduler: GetStatusResponse.session_version


def kv_groups_problem(scheduler_minor: int, windows: Sequence[int]) -> str | None:
    """Why a worker whose KV groups have these windows cannot take this scheduler's steps.

    None when it can. 0 stands for no window; without groups there is one that has none.
    """
    if scheduler_minor >= MINOR_WITH_KV_GROUPS or (len(windows) <= 1 and not any(windows)):
        return None
    return (
        f"protocol_minor {scheduler_minor} knows no kv_groups, of which this worker has "
        f"{len(windows)}: update the scheduler"
    )


def session_problem(theirs: int) -> str | None:
    """Why a gateway cannot talk to a scheduler of this version; 0: one before versions were told.

    None when it can.
    """
    if theirs in (0, SESSION_MAJOR):
        return None
    return (
        f"the scheduler speaks session_version {theirs}, this gateway {SESSION_MAJOR}: update the "
        f"{'gateway' if theirs > SESSION_MAJOR else 'scheduler'}"
    )
