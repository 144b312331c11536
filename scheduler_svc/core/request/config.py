"""Limits and policy of a scheduler core, validated once."""

import math
from dataclasses import dataclass
from enum import Enum

from scheduler_svc.core.request.kv_groups import KvGroup
from scheduler_svc.core.request.requirement import RequirementKind, Requirements


class Policy(Enum):
    """The order in which waiting sequences are admitted."""

    FCFS = "fcfs"  # first come, first served
    PRIORITY = "priority"  # the smallest priority number first
    FAIR = "fair"  # the tenant served least first


class CachePolicy(Enum):
    """The cached blocks that are reused under pressure, and the sequence that enters then."""

    LRU = "lru"  # the block freed longest ago; the queue's order
    SESSIONS = "sessions"  # what no session will read first; who has least to compute


class Preemption(Enum):
    """The destination of a preempted sequence's KV."""

    RECOMPUTE = "recompute"  # none: it is computed again
    SWAP = "swap"  # host memory, while it has room


_NOT_NEGATIVE = (
    "num_host_blocks",
    "num_tier_blocks",
    "num_disk_blocks",
    "num_state_snapshots",
    "long_prefill_token_threshold",
    "queue_window",
    "max_overtakes",
    "max_waiting_requests",
    "max_waiting_tokens",
    "max_waiting_requests_per_tenant",
    "max_waiting_tokens_per_tenant",
)
_MAX_NAMESPACE_BYTES = 16  # that the hash of a first block's parent takes


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one worker group and settings of the policy.

    Raises ValueError, naming the field, when a value or a combination cannot work.
    """

    num_blocks: int  # including the null block 0
    block_size: int  # tokens, of group 0
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    long_prefill_token_threshold: int = (
        0  # most prompt tokens of one sequence per step; 0: no limit
    )
    enable_prefix_caching: bool = True
    # Sequences have states in slots that no block holds: one begins at its first token, or after
    # tokens whose states are in a snapshot.
    has_states: bool = False
    num_state_snapshots: int = 0  # that the worker has room for
    # Tokens between two snapshots of a sequence that decodes; fewer are not worth one.
    state_interval: int = 64
    preemption: Preemption = Preemption.RECOMPUTE
    num_host_blocks: int = 0  # blocks in host memory for swapped sequences
    num_tier_blocks: int = 0  # blocks in host memory for what prompts computed; 0: no tier
    num_disk_blocks: int = 0  # blocks that a disk has room for, likewise
    # Of the hashes of cached blocks: the KV cache's type, where that is not the model's own.
    hash_namespace: str = ""
    weights_version: str = ""  # of the worker; blocks of two versions are never shared
    policy: Policy = Policy.FCFS
    cache_policy: CachePolicy = CachePolicy.LRU
    priority_ageing_s: float = 60.0  # seconds of waiting that count as one priority level
    tenant_weights: tuple[tuple[str, float], ...] = ()  # of the fair share; 1 for all others
    queue_window: int = 4  # requests tried after a waiting one that has no room
    max_overtakes: int = 16  # times that one request may be overtaken this way
    kv_groups: tuple[KvGroup, ...] = ()  # group 0 first; empty: it alone, without a window
    # What the worker prepares apart from its steps. Without grammars it reads each in a step.
    prepared_kinds: tuple[RequirementKind, ...] = ()
    keeps_pictures_whole: bool = False  # no step ends within a picture
    # Limits of the queue; a request that would exceed one is refused. 0: no limit.
    max_waiting_requests: int = 0
    max_waiting_tokens: int = 0
    max_waiting_requests_per_tenant: int = 0
    max_waiting_tokens_per_tenant: int = 0

    def __post_init__(self) -> None:
        for name in (
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "vocab_size",
            "state_interval",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.num_blocks < 2:
            raise ValueError(
                f"num_blocks is {self.num_blocks}, must be at least 2 (block 0 is null)"
            )
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len is {self.max_model_len}, must be at least 2")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs "
                f"({self.max_num_seqs}): a full decode batch would not fit in one step"
            )
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")
        if len(self.hash_namespace.encode()) > _MAX_NAMESPACE_BYTES:
            raise ValueError(f"hash_namespace is longer than {_MAX_NAMESPACE_BYTES} bytes")
        if self.groups[0].block_size != self.block_size:
            raise ValueError(
                f"kv_groups: block_size of group 0 is {self.groups[0].block_size}, not "
                f"{self.block_size}"
            )
        if self.num_state_snapshots and not self.has_states:
            raise ValueError("num_state_snapshots is given, and sequences have no states")
        if self.num_tier_blocks and (self.kv_groups or self.has_states):
            raise ValueError("num_tier_blocks is given, and there is more than one table of blocks")
        if not 0 < self.priority_ageing_s < math.inf:
            raise ValueError(f"priority_ageing_s is {self.priority_ageing_s}, must be positive")
        for tenant, weight in self.tenant_weights:
            if not 0 < weight < math.inf:
                raise ValueError(f"the weight of tenant {tenant!r} is {weight}, must be positive")

    @property
    def groups(self) -> tuple[KvGroup, ...]:
        """The KV groups, at least one."""
        return self.kv_groups or (KvGroup(self.block_size),)

    @property
    def has_window(self) -> bool:
        """True if blocks of a group are freed while their sequence runs."""
        return any(group.window is not None for group in self.kv_groups)

    def blocks_needed(self, max_len: int) -> int:
        """Most blocks that a sequence of `max_len` tokens holds at once when it runs alone."""
        # The last token is never computed, so it needs no room.
        if not self.kv_groups:
            return -(-(max_len - 1) // self.block_size)
        budget, threshold = self.max_num_batched_tokens, self.long_prefill_token_threshold
        chunk = budget if self.keeps_pictures_whole else min(budget, threshold or budget)
        return sum(group.most_blocks(max_len - 1, chunk) for group in self.groups)

    def requirements_problem(self, requirements: Requirements) -> str | None:
        """Why the worker cannot serve a request with these; None when it can."""
        if not requirements:
            return None
        if len(set(requirements)) < len(requirements):
            return "requirements: two are equal"
        # A grammar that is not prepared is read in a step.
        kinds = (RequirementKind.GRAMMAR, *self.prepared_kinds)
        lacking = [one.kind.value for one in requirements if one.kind not in kinds]
        return f"requirements: the worker prepares no {lacking[0]}" if lacking else None

    @property
    def num_usable_blocks(self) -> int:
        """Number of blocks that sequences can hold."""
        return self.num_blocks - 1
