"""Status of the scheduler as counters and gauges."""

import time
from collections.abc import Callable
from dataclasses import asdict

from pagewire.v1 import scheduler_pb2, types_pb2
from scheduler_svc.core import Scheduler
from scheduler_svc.core.kv.sessions_view import SessionInfo
from scheduler_svc.engine import Engine
from scheduler_svc.group import WorkerGroup
from scheduler_svc.metrics.totals import COUNTERS
from wire.versions import SESSION_MAJOR

# Field name to a number that is summed over the worker groups.
_SUMS: dict[str, Callable[[Scheduler], int]] = {
    **COUNTERS,
    "num_running": lambda core: core.num_running,
    "num_waiting": lambda core: core.num_waiting,
    "num_preempted": lambda core: core.view.num_preempted,
    "num_waiting_tokens": lambda core: core.view.num_waiting_tokens,
    "num_blocks": lambda core: core.view.num_blocks,
    "num_free_blocks": lambda core: core.view.num_free_blocks,
    "num_cached_blocks": lambda core: core.view.num_cached_blocks,
    "num_tier_blocks": lambda core: core.transfers.num_tier_blocks,
    "num_tier_cached_blocks": lambda core: core.transfers.num_held_tier_blocks,
    "num_disk_blocks": lambda core: core.transfers.num_disk_blocks,
    "num_disk_cached_blocks": lambda core: core.transfers.num_held_disk_blocks,
    "num_host_blocks": lambda core: core.view.num_host_blocks,
    "num_free_host_blocks": lambda core: core.view.num_free_host_blocks,
    "max_num_seqs": lambda core: core.config.max_num_seqs,
}
_OF_A_GROUP = (
    "num_running",
    "num_waiting",
    "num_blocks",
    "num_free_blocks",
    "num_steps",
    "num_output_tokens",
)


def status_of(
    engine: Engine, *, foresees: bool = True, most_sessions: int = 0
) -> scheduler_pb2.GetStatusResponse:
    """Current counters and gauges; the seconds of backlog cost more than all else together.

    With up to so many sessions of each group.
    """
    named = next((group for group in engine.groups if group.is_ready), None)
    named = named or next(iter(engine.groups), None)
    status = scheduler_pb2.GetStatusResponse(
        ready=engine.is_ready,
        reason=engine.reason,
        model=engine.model,
        session_version=SESSION_MAJOR,
        uptime_s=engine.uptime_s,
        num_overloaded=engine.num_overloaded,
        stands_by=engine.stands_by,
        target_itl_ms=engine.config.target_itl_ms or 0.0,
        speculation=_speculation(engine),
        steps_by_size=engine.counts.step_sizes.counts,
        num_step_tokens=int(engine.counts.step_sizes.total),
        adapters=[types_pb2.Adapter(**source.fields()) for source in engine.adapters.sources],
        groups=[_group(group, foresees) for group in engine.groups],
    )
    if named is not None:
        status.epoch, status.worker_address = named.epoch, named.address
        status.attention_backend, status.all_reduce = named.attention_backend, named.all_reduce
        status.device, status.kv_cache_dtype = named.device, named.kv_cache_dtype
    cores = [group.core for group in engine.groups if group.core is not None]
    if not cores:
        return status
    for name, of in _SUMS.items():
        setattr(status, name, engine.retired.of(name) + sum(map(of, cores)))
    config = cores[0].config
    status.block_size, status.policy = config.block_size, config.policy.value
    status.preemption = config.preemption.value
    status.cache_policy = config.cache_policy.value
    for group in engine.groups if most_sessions else ():
        if group.core is not None:
            sessions = group.core.view.sessions.latest(most_sessions)
            status.sessions.extend(_session(one, group.address) for one in sessions)
    status.max_num_batched_tokens = max(core.config.max_num_batched_tokens for core in cores)
    backlogs_s = [g.seconds_of_backlog for g in status.groups if g.HasField("seconds_of_backlog")]
    if backlogs_s:
        status.seconds_of_backlog = max(backlogs_s)
    return status


def _session(one: SessionInfo, address: str) -> scheduler_pb2.SessionStatus:
    return scheduler_pb2.SessionStatus(worker_address=address, **asdict(one))


def _speculation(engine: Engine) -> str:
    config = engine.config.speculative_config
    return "" if config is None else config.method.value


def _group(group: WorkerGroup, foresees: bool) -> scheduler_pb2.WorkerGroupStatus:
    status = scheduler_pb2.WorkerGroupStatus(
        address=group.address,
        ready=group.is_ready,
        reason=group.why_not_open,
        source=group.source,
        draining=group.why_drained,
        epoch=group.epoch,
        num_losses=group.num_recoveries,
        why_lost=group.why_lost,
        attention_backend=group.attention_backend,
        all_reduce=group.all_reduce,
        device=group.device,
        kv_cache_dtype=group.kv_cache_dtype,
    )
    core = group.core
    if core is None:
        return status
    for name in _OF_A_GROUP:
        setattr(status, name, _SUMS[name](core))
    status.num_migrated_out, status.num_migrated_in = (
        core.migration.num_migrated_out,
        core.migration.num_migrated_in,
    )
    backlog_s = group.pace.backlog_s(core, time.monotonic()) if foresees else None
    if backlog_s is not None:
        status.seconds_of_backlog = backlog_s
    return status
