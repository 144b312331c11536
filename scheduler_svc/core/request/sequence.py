"""A sequence: the state of a request that survives the loss of its slot, blocks and worker."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np

from scheduler_svc.core.request.blame import Blame
from scheduler_svc.core.request.block_hash import NO_PARENT, chain, chain_with
from scheduler_svc.core.request.identity import Origins, Root, origins_of
from scheduler_svc.core.request.request import FinishReason, Request, TokenIds
from scheduler_svc.core.request.requirement import Requirement
from scheduler_svc.core.request.timeline import Phase, Timeline

NOTHING_PREPARED: Mapping[Requirement, int] = {}


class Status(Enum):
    """The state of a sequence. Only a running one holds a slot and blocks."""

    WAITING = "waiting"
    PREPARING = "preparing"  # new or preempted; the worker prepares what it requires
    WAITING_FOR_KV = "waiting for KV"  # new or preempted; its KV comes from a tier
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class End:
    """A sequence to finish, and why."""

    sequence: "Sequence"
    reason: FinishReason
    message: str = ""


class Sequence:
    """A request with its tokens, limits and timeline.

    While it runs, its tokens are in its slot's row (`slots.SlotTable`) and `token_ids` is stale.
    """

    __slots__ = (
        "_hashes",
        "blame",
        "is_private",
        "max_len",
        "min_len",
        "num_awaited",
        "num_cached",
        "num_found_waiting",
        "num_overtaken",
        "num_preemptions",
        "num_prompt",
        "num_prompt_outputs_delivered",
        "num_prompt_outputs_planned",
        "number",
        "origins",
        "preparations",
        "request",
        "root",
        "slot",
        "status",
        "stop_ids",
        "timeline",
        "token_ids",
    )

    def __init__(
        self,
        request: Request,
        max_len: int,
        stop_ids: tuple[int, ...],
        number: int = 0,
        namespace: str = "",
        weights_version: str = "",
    ) -> None:
        """`namespace` and `weights_version` are those of the worker that computes its blocks."""
        self.request = request
        self.number = number  # in order of arrival
        self.status = Status.WAITING
        self.token_ids: TokenIds = request.prompt_token_ids
        if request.output_token_ids is not None:
            self.token_ids = np.concatenate((request.prompt_token_ids, request.output_token_ids))
        self.num_prompt = len(request.prompt_token_ids)
        self.max_len = max_len  # tokens, prompt included, at which it ends for length
        # No stop token ends it before; beyond max_len, which a column holds, none ever does.
        self.min_len = min(self.num_prompt + request.min_tokens, max_len + 1)
        self.stop_ids = stop_ids  # end-of-sequence and stop tokens
        self.slot: int | None = None
        self.num_cached: int | None = None  # prompt tokens cached at the first admission
        # Most of them that the cache held while it waited, if it looked: those that are not among
        # `num_cached` were given to others.
        self.num_found_waiting = 0
        self.num_preemptions = 0
        self.num_overtaken = 0  # later sequences admitted while this one did not fit
        self.timeline = Timeline(request.arrival_s)
        self.num_awaited = 0  # sampled tokens in flight to a preempted sequence
        # Neither reads nor fills the prefix cache.
        self.is_private = request.skip_prefix_cache
        self.blame: Blame | None = None  # None: no worker was lost during its steps
        if request.num_deaths:
            place = len(self.token_ids)
            self.blame = Blame(num_deaths=request.num_deaths, place=place, is_suspect=True)
        # Prompt positions before these have no outputs left to deliver;
        # `num_prompt_outputs_planned` includes the steps in flight.
        self.num_prompt_outputs_delivered = self.num_prompt_outputs_planned = (
            request.prompt_output_begin
        )
        # Ids of what is asked for or ready; empty before, and while it runs.
        self.preparations: Mapping[Requirement, int] = NOTHING_PREPARED
        self.forget_hashes(namespace, weights_version)

    @property
    def has_run(self) -> bool:
        """True if it has held a slot."""
        return self.num_cached is not None

    @property
    def waiting_phase(self) -> Phase:
        """The phase in which it waits, while there is a worker."""
        if self.status is Status.PREPARING:
            return Phase.PREPARING
        if self.status is Status.WAITING_FOR_KV:
            return Phase.KV
        return Phase.PREEMPTED if self.has_run else Phase.QUEUE

    @property
    def is_suspect(self) -> bool:
        """True if it computes alone, since a process died in its last step."""
        return self.blame is not None and self.blame.is_suspect

    @property
    def num_output(self) -> int:
        """Number of tokens generated, as far as `token_ids` is current."""
        return len(self.token_ids) - self.num_prompt

    @property
    def has_prompt_outputs_due(self) -> bool:
        """True if prompt outputs of some positions are not planned yet."""
        return self.num_prompt_outputs_planned < self.request.prompt_output_end

    @property
    def num_skippable(self) -> int:
        """Most tokens that a prefix hit may skip: not the last, and none with outputs due."""
        most = len(self.token_ids) - 1
        return min(most, self.num_prompt_outputs_planned) if self.has_prompt_outputs_due else most

    def append(self, token_id: int) -> None:
        """Appends a token that arrived after the sequence lost its slot."""
        self.token_ids = np.append(self.token_ids, np.int32(token_id))

    def lose_kv(self) -> None:
        """Resets `is_private`: its KV is lost, and KV computed from now on may be shared again."""
        self.is_private = self.request.skip_prefix_cache

    def forget_hashes(self, namespace: str, weights_version: str = "") -> None:
        """Begins its hashes anew, for blocks of a worker, or because the request has changed."""
        request = self.request
        self.root = NO_PARENT  # parent of its first block
        self.origins: Origins | None = None
        salt, adapter_id, extras = request.cache_salt, request.adapter_id, request.extras
        if salt or namespace or weights_version or adapter_id or extras:
            root = Root(salt, namespace, weights_version, adapter_id)
            self.root, self.origins = root.hash, origins_of(root, extras)
        self._hashes: dict[int, list[int]] = {}  # by block size

    def block_hashes(self, block_size: int) -> list[int]:
        """Hashes of the full blocks of `token_ids`, and possibly of more."""
        return self.extend_hashes(self.token_ids, block_size)

    def extend_hashes(self, token_ids: TokenIds, block_size: int) -> list[int]:
        """Hashes of at least the full blocks of `token_ids`, its first tokens; computed once."""
        hashes = self._hashes.setdefault(block_size, [])
        known = len(hashes)
        parent = hashes[-1] if known else self.root or None
        begin, extras = known * block_size, self.request.extras
        if extras:
            hashes += chain_with(extras, begin, token_ids[begin:], block_size, parent)
        else:
            hashes += chain(token_ids[begin:], block_size, parent)
        return hashes
