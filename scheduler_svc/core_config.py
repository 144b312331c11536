"""Combines this process's options with the worker's limits."""

from pagewire.v1 import worker_pb2
from scheduler_svc.config import ServiceConfig
from scheduler_svc.core import SchedulerConfig


def core_config(config: ServiceConfig, worker: worker_pb2.WorkerDescription) -> SchedulerConfig:
    """The configuration of a worker group's core."""
    max_num_seqs = min(config.max_num_seqs, worker.max_num_seqs)
    budget = min(config.max_num_batched_tokens, worker.max_num_batched_tokens)
    return SchedulerConfig(
        num_blocks=worker.num_blocks,
        block_size=worker.block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=worker.model.max_model_len,
        vocab_size=worker.model.vocab_size,
        eos_token_ids=tuple(worker.model.eos_token_ids),
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        enable_prefix_caching=config.enable_prefix_caching,
        preemption=config.preemption,
        num_host_blocks=worker.num_host_blocks,
        policy=config.policy,
        priority_ageing_s=config.priority_ageing_s,
        tenant_weights=config.tenant_weights,
        queue_window=config.queue_window,
        max_overtakes=config.max_overtakes,
        prepares_grammars=worker.prepares_grammars,
        max_waiting_requests=config.max_waiting_requests,
        max_waiting_tokens=config.max_waiting_tokens,
        max_waiting_requests_per_tenant=config.max_waiting_requests_per_tenant,
        max_waiting_tokens_per_tenant=config.max_waiting_tokens_per_tenant,
    )
