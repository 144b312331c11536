"""One line of the log for each step, with --log-steps."""

import logging

from scheduler_svc.core import Scheduler
from scheduler_svc.explain.trace import StepRecord

log = logging.getLogger("scheduler_svc.steps")


def log_step(record: StepRecord, core: Scheduler) -> None:
    """Writes the line of a step whose result was applied."""
    plan, num_tokens = record.plan, record.plan.num_tokens
    fields = {
        "step": plan.step_id,
        "tokens": num_tokens,
        "prefill_tokens": plan.num_prefill_tokens,
        "budget": core.config.max_num_batched_tokens,
        "free_blocks": plan.num_free_blocks,
        "blocks": core.view.num_blocks,
        "running": len(plan.running.sequences),
        "waiting": core.num_waiting,
        "preempted": len(plan.preempted),
        "ms": round((record.duration_s or 0.0) * 1e3, 3),
    }
    log.info(
        "step %d: %d of %d tokens (%d of prompts), %d of %d blocks free, %d running, %d waiting, "
        "%d preempted, %.3f ms",
        *(plan.step_id, num_tokens, fields["budget"], plan.num_prefill_tokens),
        *(plan.num_free_blocks, fields["blocks"], fields["running"], fields["waiting"]),
        *(fields["preempted"], fields["ms"]),
        extra=fields,
    )
