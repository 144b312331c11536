"""The keys that families with experts share."""

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.spec import UnsupportedModel

COUNTS = ("num_experts", "num_local_experts")  # two names of one number
KEYS = frozenset({*COUNTS, "num_experts_per_tok"})


def counts(config: ConfigJson, default: int, default_per_token: int) -> tuple[int, int]:
    """(experts of a layer, experts of a token). Raises UnsupportedModel."""
    given = {config.positive(name) for name in COUNTS if config.get(name) is not None}
    if len(given) > 1:
        raise UnsupportedModel(f"{COUNTS[0]}: differs from {COUNTS[1]}, and only one can hold")
    num_experts = given.pop() if given else default
    top_k = config.positive("num_experts_per_tok", default_per_token)
    if top_k > num_experts:
        raise UnsupportedModel(f"num_experts_per_tok: {top_k} of {num_experts} experts")
    return num_experts, top_k
