"""Combines this process's options with the worker's limits."""

from dataclasses import dataclass

from pagewire.v1 import types_pb2, worker_pb2
from scheduler_svc.config import ServiceConfig
from scheduler_svc.core import KvGroup, RequirementKind, SchedulerConfig
from scheduler_svc.worker.served import WrongWorker
from wire.versions import (
    DISK_TIER,
    HOST_TIER,
    MINOR_WITH_ADAPTERS,
    MINOR_WITH_DISK,
    MINOR_WITH_KV_GROUPS,
    MINOR_WITH_PEERS,
    MINOR_WITH_TIERS,
)

_KNOWN_KINDS = (
    worker_pb2.KV_GROUP_KIND_UNSPECIFIED,
    worker_pb2.KV_GROUP_KIND_KEYS_AND_VALUES,
)
_TIERS = {HOST_TIER: MINOR_WITH_TIERS, DISK_TIER: MINOR_WITH_DISK}  # to the first minor version
_PREPARED = {
    RequirementKind.GRAMMAR: "grammars",
    RequirementKind.ADAPTER: "adapters",
    RequirementKind.ENCODER_OUTPUT: "pictures",
}


def core_config(config: ServiceConfig, worker: worker_pb2.WorkerDescription) -> SchedulerConfig:
    """The configuration of a worker group's core. Raises WrongWorker for groups it cannot have."""
    max_num_seqs = min(config.max_num_seqs, worker.max_num_seqs)
    budget = min(config.max_num_batched_tokens, worker.max_num_batched_tokens)
    return SchedulerConfig(
        num_blocks=worker.num_blocks,
        block_size=worker.block_size,
        kv_groups=_kv_groups(worker),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=worker.model.max_model_len,
        vocab_size=worker.model.vocab_size,
        eos_token_ids=_eos_token_ids(worker.model),
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        enable_prefix_caching=config.enable_prefix_caching and _keeps_prefixes(worker),
        has_states=worker.has_states,
        num_state_snapshots=worker.num_state_snapshots if worker.has_states else 0,
        preemption=config.preemption,
        num_host_blocks=worker.num_host_blocks,
        num_tier_blocks=tier_of(worker, HOST_TIER).num_blocks,
        num_disk_blocks=tier_of(worker, DISK_TIER).num_blocks,
        hash_namespace=_namespace(worker),
        policy=config.policy,
        cache_policy=config.cache_policy,
        priority_ageing_s=config.priority_ageing_s,
        tenant_weights=config.tenant_weights,
        queue_window=config.queue_window,
        max_overtakes=config.max_overtakes,
        prepared_kinds=_prepared_kinds(worker),
        keeps_pictures_whole=worker.keeps_pictures_whole,
        max_waiting_requests=config.max_waiting_requests,
        max_waiting_tokens=config.max_waiting_tokens,
        max_waiting_requests_per_tenant=config.max_waiting_requests_per_tenant,
        max_waiting_tokens_per_tenant=config.max_waiting_tokens_per_tenant,
    )


def check_successor(before: SchedulerConfig, worker: worker_pb2.WorkerDescription) -> None:
    """Raises WrongWorker unless a core of this configuration can go on with the worker."""
    if worker.block_size != before.block_size or worker.max_num_seqs < before.max_num_seqs:
        raise WrongWorker("its block_size or max_num_seqs differs from the worker before it")
    if _kv_groups(worker) != before.kv_groups:
        raise WrongWorker("its kv_groups differ from those of the worker before it")
    if _namespace(worker) != before.hash_namespace:
        raise WrongWorker(f"its kv_dtype, {worker.kv_dtype}, differs from the worker before it")
    if worker.has_states != before.has_states:
        raise WrongWorker("its sequences have states in their slots, or the earlier worker's had")
    if bool(before.num_state_snapshots) != bool(worker.num_state_snapshots):
        raise WrongWorker("one of it and the worker before it makes snapshots of states")
    for kind in before.prepared_kinds:
        if kind not in _prepared_kinds(worker):
            raise WrongWorker(f"it does not prepare {_PREPARED[kind]}, unlike the worker before it")


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """The facts that workers need to pull blocks from one of them."""

    incarnation: int
    layout_hash: bytes
    handles: dict[str, bytes]  # by transport, in the worker's order


def peer_facts(worker: worker_pb2.WorkerDescription) -> PeerFacts | None:
    """The facts of a worker from which blocks can be pulled, and which pulls; None for others."""
    if worker.protocol_minor < MINOR_WITH_PEERS or not worker.kv_layout_hash:
        return None
    handles = {one.name: one.handle for one in worker.transports}
    return PeerFacts(worker.incarnation, worker.kv_layout_hash, handles)


def tier_of(worker: worker_pb2.WorkerDescription, name: str) -> worker_pb2.KvTier:
    """The worker's tier of this name; one without blocks where not both sides know it."""
    if worker.protocol_minor < _TIERS[name] or worker.has_states or _kv_groups(worker):
        return worker_pb2.KvTier()
    known = (tier for tier in worker.tiers if tier.name == name)
    return next(known, worker_pb2.KvTier())


def _kv_groups(worker: worker_pb2.WorkerDescription) -> tuple[KvGroup, ...]:
    """The worker's KV groups; none if it has one alone, without a window."""
    if not worker.kv_groups:
        return ()
    if worker.protocol_minor < MINOR_WITH_KV_GROUPS:
        raise WrongWorker(f"it has kv_groups, and protocol_minor {worker.protocol_minor}")
    for index, told in enumerate(worker.kv_groups):
        if told.kind not in _KNOWN_KINDS:
            raise WrongWorker(f"kv_groups[{index}]: its kind is {told.kind}, which is unknown here")
    try:
        groups = tuple(KvGroup(told.block_size, told.window or None) for told in worker.kv_groups)
    except ValueError as error:
        raise WrongWorker(str(error)) from error
    if groups[0].block_size != worker.block_size:
        raise WrongWorker(
            f"kv_groups[0]: its block_size is {groups[0].block_size}, the worker's "
            f"{worker.block_size}"
        )
    return () if groups == (KvGroup(worker.block_size),) else groups


def _keeps_prefixes(worker: worker_pb2.WorkerDescription) -> bool:
    """True if all that a prefix leaves is kept for others."""
    return not worker.has_states or worker.num_state_snapshots > 0


def _prepared_kinds(worker: worker_pb2.WorkerDescription) -> tuple[RequirementKind, ...]:
    kinds = {
        RequirementKind.GRAMMAR: worker.prepares_grammars,
        RequirementKind.ADAPTER: worker.max_adapters
        and worker.protocol_minor >= MINOR_WITH_ADAPTERS,
        RequirementKind.ENCODER_OUTPUT: worker.encodes_pictures,
    }
    return tuple(kind for kind, is_prepared in kinds.items() if is_prepared)


def _namespace(worker: worker_pb2.WorkerDescription) -> str:
    return "" if worker.kv_dtype == worker.model.dtype else worker.kv_dtype


def _eos_token_ids(model: types_pb2.ModelInfo) -> tuple[int, ...]:
    """The ids that end an output; no row may name one that the worker's vocabulary lacks."""
    return tuple(token_id for token_id in model.eos_token_ids if token_id < model.vocab_size)
