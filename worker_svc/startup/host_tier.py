"""The size of the tier in host memory (--host-tier-gib), and what cannot have one."""

from worker_svc.config import UnsupportedOption, WorkerConfig
from worker_svc.models.step_model import StepModel
from worker_svc.startup.kv_sizing import GIB


def require_tiered(config: WorkerConfig, model: StepModel, num_tables: int) -> None:
    """Raises UnsupportedOption, naming the option, if blocks alone are not all that is kept."""
    problems = {
        "a model with several KV groups, or a window, without --kv-groups one": num_tables > 1,
        "a model with recurrent states": model.states is not None or bool(model.state_bytes),
        "a draft model": config.draft_model is not None,
        "several ranks": model.group.size > 1,
    }
    for what, is_so in problems.items():
        if config.host_tier_gib and is_so:
            raise UnsupportedOption(f"host_tier_gib: {config.host_tier_gib} cannot serve {what}")


def num_tier_blocks(config: WorkerConfig, block_bytes: int) -> int:
    """Blocks of so many bytes that the tier has room for; 0: there is no tier."""
    return int(config.host_tier_gib * GIB) // block_bytes
