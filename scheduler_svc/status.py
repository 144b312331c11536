"""The scheduler in numbers."""

import time

from pagewire.v1 import scheduler_pb2
from scheduler_svc.engine import Engine


def status_of(engine: Engine) -> scheduler_pb2.GetStatusResponse:
    """Counters and gauges of this moment."""
    status = scheduler_pb2.GetStatusResponse(
        ready=engine.is_ready,
        reason=engine.reason,
        model=engine.model,
        epoch=engine.group.epoch,
        worker_address=engine.group.address,
        uptime_s=engine.uptime_s,
    )
    core = engine.group.core
    if core is None:
        return status
    pool, counters = core.residency.pool, core.counters
    status.num_running = core.num_running
    status.num_waiting = core.num_waiting
    status.num_waiting_tokens = core.residency.waiting.num_tokens
    status.num_blocks = pool.num_blocks - 1
    status.num_free_blocks = pool.num_free
    status.block_size = core.config.block_size
    status.num_steps = counters.num_steps
    status.prefix_query_tokens = counters.prefix_query_tokens
    status.prefix_hit_tokens = counters.prefix_hit_tokens
    status.num_evictions = core.residency.num_evictions
    status.num_cached_blocks = len(pool.cache)
    status.num_preemptions = core.residency.num_preemptions
    status.num_accepted = core.num_accepted
    status.num_finished = core.num_finished
    status.num_output_tokens = core.num_output_tokens
    status.num_prefill_tokens = counters.num_prefill_tokens
    status.max_num_seqs = core.config.max_num_seqs
    status.max_num_batched_tokens = core.config.max_num_batched_tokens
    status.num_overloaded = core.intake.num_refused
    status.num_expired = core.num_expired
    status.policy = core.config.policy.value
    backlog_s = engine.group.pace.backlog_s(core, time.monotonic())
    if backlog_s is not None:
        status.seconds_of_backlog = backlog_s
    return status
