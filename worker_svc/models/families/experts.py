"""The keys that families with experts share."""

from dataclasses import replace

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.spec import ModelSpec, MoeSpec, SharedSpec, UnsupportedModel

COUNTS = ("num_experts", "num_local_experts")  # two names of one number
KEYS = frozenset({*COUNTS, "num_experts_per_tok"})
SPARSE_KEYS = frozenset({"decoder_sparse_step", "mlp_only_layers"})


def counts(
    config: ConfigJson,
    default: int | None,
    default_per_token: int | None,
    names: tuple[str, ...] = COUNTS,
) -> tuple[int, int]:
    """(experts of a layer, experts of a token). Raises UnsupportedModel.

    The defaults hold where config.json says nothing; None: it must.
    """
    given = {config.positive(name) for name in names if config.get(name) is not None}
    if len(given) > 1:
        raise UnsupportedModel(f"{names[0]}: differs from {names[1]}, and only one can hold")
    num_experts = given.pop() if given else config.positive(names[0], default)
    top_k = config.positive("num_experts_per_tok", default_per_token)
    if top_k > num_experts:
        raise UnsupportedModel(f"num_experts_per_tok: {top_k} of {num_experts} experts")
    return num_experts, top_k


def sparse(config: ConfigJson, spec: ModelSpec, feed: MoeSpec) -> ModelSpec:
    """The model with experts in the layers that Qwen's keys name. Raises UnsupportedModel."""
    step = config.positive("decoder_sparse_step", 1)
    dense_layers = config.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list) or any(type(each) is not int for each in dense_layers):
        raise UnsupportedModel(f"mlp_only_layers: {dense_layers!r} is no list of integers")
    layers = (
        replace(layer, feed=feed)
        if index not in dense_layers and (index + 1) % step == 0
        else layer
        for index, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=tuple(layers))


def shared(
    size: int,
    intermediate_size: int,
    *,
    is_gated: bool,
    name: str = "shared_expert_intermediate_size",
) -> SharedSpec:
    """An expert of every token of this size, which the key `name` says.

    Raises UnsupportedModel unless it is a multiple.
    """
    count, rest = divmod(size, intermediate_size)
    if rest:
        raise UnsupportedModel(
            f"{name}: {size} is no multiple of the {intermediate_size} of an expert"
        )
    return SharedSpec(count, is_gated)
