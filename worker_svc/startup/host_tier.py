"""The size of the tier in host memory (--host-tier-gib), and which models have blocks alone."""

from worker_svc.config import UnsupportedOption, WorkerConfig
from worker_svc.models.step_model import StepModel
from worker_svc.startup.kv_sizing import GIB


def require_tiered(config: WorkerConfig, model: StepModel, num_tables: int) -> None:
    """Raises UnsupportedOption, naming the option, if blocks alone are not all that is kept."""
    if config.host_tier_gib:
        _require_blocks_alone(f"host_tier_gib: {config.host_tier_gib}", config, model, num_tables)
    if config.disk_tier is not None:
        _require_blocks_alone(f"disk_tier: {config.disk_tier}", config, model, num_tables)


def require_movable(config: WorkerConfig, model: StepModel, num_tables: int) -> None:
    """Raises UnsupportedOption if blocks alone are not all that would have to move to a worker."""
    if config.kv_transport:
        told = f"kv_transport: {','.join(config.kv_transport)}"
        _require_blocks_alone(told, config, model, num_tables)


def _require_blocks_alone(
    option: str, config: WorkerConfig, model: StepModel, num_tables: int
) -> None:
    problems = {
        "a model with several KV groups, or a window, without --kv-groups one": num_tables > 1,
        "a model with recurrent states": model.states is not None or bool(model.state_bytes),
        "a draft model": config.draft_model is not None,
        "several ranks": model.group.size > 1,
    }
    for what, is_so in problems.items():
        if is_so:
            raise UnsupportedOption(f"{option} cannot serve {what}")


def num_tier_blocks(config: WorkerConfig, block_bytes: int) -> int:
    """Blocks of so many bytes that the tier has room for; 0: there is no tier."""
    return int(config.host_tier_gib * GIB) // block_bytes
