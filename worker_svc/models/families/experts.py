"""The keys that families with experts share."""

from dataclasses import dataclass, replace

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.spec import ModelSpec, MoeSpec, RouterSpec, SharedSpec, UnsupportedModel

COUNTS = ("num_experts", "num_local_experts")  # two names of one number
KEYS = frozenset({*COUNTS, "num_experts_per_tok"})
SPARSE_KEYS = frozenset({"decoder_sparse_step", "mlp_only_layers"})
# Of families whose experts are chosen by sigmoids, after some layers that have one MLP.
ROUTED_COUNTS = ("n_routed_experts", "num_local_experts")
ROUTED_KEYS = frozenset(ROUTED_COUNTS) | {
    "first_k_dense_replace",
    "moe_intermediate_size",
    "n_group",
    "n_shared_experts",
    "norm_topk_prob",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "topk_group",
}


@dataclass(frozen=True, slots=True)
class RoutedDefaults:
    """Values of a family's configuration class, where config.json says nothing; None: it must."""

    num_experts: int | None
    top_k: int | None
    intermediate_size: int  # of each expert
    num_shared: int | None  # of the others that the one of every token is as wide as
    renormalizes: bool
    num_dense: int = 0  # layers that have one MLP, the first ones
    scale: float = 1.0  # of the weights
    groups: tuple[int, int] = (1, 1)  # of experts, and those that a token chooses from


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


def routed(config: ConfigJson, spec: ModelSpec, defaults: RoutedDefaults) -> ModelSpec:
    """The model with experts that sigmoids and a bias choose, and one that every token has.

    Raises UnsupportedModel, naming the key.
    """
    router = RouterSpec(
        *counts(config, defaults.num_experts, defaults.top_k, ROUTED_COUNTS),
        renormalizes=config.flag("norm_topk_prob", defaults.renormalizes),
        is_sigmoid=True,
        has_bias=True,
        scale=_scale(config, defaults.scale),
    )
    router = _grouped(config, router, defaults.groups)
    size = config.positive("moe_intermediate_size", defaults.intermediate_size)
    shared_size = size * config.positive("n_shared_experts", defaults.num_shared)
    feed = MoeSpec(router, size, shared(shared_size, size, is_gated=False))
    num_dense = config.count("first_k_dense_replace", defaults.num_dense)
    layers = (
        layer if index < num_dense else replace(layer, feed=feed)
        for index, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=tuple(layers))


def _scale(config: ConfigJson, default: float) -> float:
    scale = config.get("routed_scaling_factor")
    if scale is not None and (not isinstance(scale, int | float) or isinstance(scale, bool)):
        raise UnsupportedModel(f"routed_scaling_factor: {scale!r} is no number")
    return default if scale is None else float(scale)


def _grouped(config: ConfigJson, router: RouterSpec, default: tuple[int, int]) -> RouterSpec:
    """The router with the groups of the configuration. Raises UnsupportedModel."""
    count = config.positive("n_group", default[0])
    kept = config.positive("topk_group", default[1])
    if kept > count:
        raise UnsupportedModel(f"topk_group: {kept} of {count} groups")
    size, rest = divmod(router.num_experts, count)
    if rest or size < 2 <= count:
        raise UnsupportedModel(
            f"n_group: {count} groups of {router.num_experts} experts, which need two or more each"
        )
    if router.top_k > kept * size:
        raise UnsupportedModel(
            f"topk_group: {kept} groups of {size} have no {router.top_k} experts for a token"
        )
    return replace(router, num_groups=count, kept_groups=kept)


def drafting_layers(spec: ModelSpec, count: int) -> str:
    """The tensors of so many layers after the last one, which draft: a regular expression."""
    after = "|".join(str(spec.num_layers + index) for index in range(count))
    return rf"model\.layers\.({after})\..*" if count else ""
