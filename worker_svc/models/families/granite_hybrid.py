"""Granite 4: Mamba-2 in most layers, attention in the others; experts, or one MLP."""

from dataclasses import replace

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.config_keys import FULL_ATTENTION
from worker_svc.models.families import dense, experts, granite, mamba
from worker_svc.models.families.family import Family
from worker_svc.models.families.mamba import MAMBA, OLDER
from worker_svc.models.spec import (
    LayerSpec,
    Mamba2Spec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    RouterSpec,
    TensorNames,
    UnsupportedModel,
)

# Where config.json has none:
EXPERTS, EXPERTS_PER_TOKEN, SHARED_SIZE = 8, 2, 1024
HEADS, GROUPS, STATE_SIZE, WIDTH, EXPAND = 128, 1, 256, 4, 2
DENSE_NAMES = TensorNames(
    recurrent="mamba", mlp="shared_mlp", mlp_gate_up="input_linear", mlp_down="output_linear"
)
NAMES = replace(
    DENSE_NAMES,
    mlp="block_sparse_moe",
    router="router.layer",
    stacks_outputs=("input_linear.weight", "output_linear.weight"),
    shared_mlp="shared_mlp",
)


def read(config: ConfigJson) -> ModelSpec:
    kinds = [OLDER.get(kind, kind) for kind in config.get("layer_types") or ()]
    spec = granite.decoder(replace(config, values={**config.values, "layer_types": None}))
    kinds = kinds or [MAMBA] * spec.num_layers
    dense.check_types(kinds, (MAMBA, FULL_ATTENTION), spec.num_layers)
    if FULL_ATTENTION not in kinds:
        raise UnsupportedModel("layer_types: no layer has attention")
    feed = _feed(config)
    layers = [
        _layer(config, kind, layer, feed) for kind, layer in zip(kinds, spec.layers, strict=True)
    ]
    names = NAMES if isinstance(feed, MoeSpec) else DENSE_NAMES
    return replace(spec, layers=tuple(layers), names=names)


def _layer(config: ConfigJson, kind: str, layer: LayerSpec, feed: MlpSpec | MoeSpec) -> LayerSpec:
    if kind == MAMBA:
        return LayerSpec(_mamba(config), feed)
    rotation = config.get("position_embedding_type")
    if rotation not in (None, "nope", "rope"):
        raise UnsupportedModel(
            f"position_embedding_type: {rotation!r} is not supported, only 'rope' and 'nope' are"
        )
    rotates = rotation == "rope"
    return replace(layer if rotates else layer.unrotated, feed=feed)


def _mamba(config: ConfigJson) -> Mamba2Spec:
    """The recurrent layers. Raises UnsupportedModel, naming the key."""
    size = config.positive("mamba_expand", EXPAND) * config.positive("hidden_size")
    num_heads = config.positive("mamba_n_heads", HEADS)
    given = config.get("mamba_d_head")
    head_dim = size // num_heads if given in (None, "auto") else config.positive("mamba_d_head")
    if num_heads * head_dim != size:
        raise UnsupportedModel(
            f"mamba_d_head: {num_heads} heads of {head_dim} are not the {size} of mamba_expand"
        )
    return Mamba2Spec(
        num_heads,
        head_dim,
        num_groups=config.positive("mamba_n_groups", GROUPS),
        state_size=config.positive("mamba_d_state", STATE_SIZE),
        width=config.positive("mamba_d_conv", WIDTH),
        norm_eps=float(config.required("rms_norm_eps")),
        conv_bias=config.flag("mamba_conv_bias", True),
        bias=config.flag("mamba_proj_bias"),
    )


def _feed(config: ConfigJson) -> MlpSpec | MoeSpec:
    """The experts and the one of every token, or that alone. Raises UnsupportedModel."""
    name = "shared_intermediate_size"
    shared_size = config.positive(name, SHARED_SIZE)
    if config.get("num_local_experts") == 0:
        return MlpSpec(shared_size)
    counts = experts.counts(config, EXPERTS, EXPERTS_PER_TOKEN, ("num_local_experts",))
    # Chosen by their logits, of which the softmax is; as is that of all, divided by their sum.
    router = RouterSpec(*counts, renormalizes=True)
    size = config.positive("intermediate_size")
    return MoeSpec(router, size, experts.shared(shared_size, size, is_gated=False, name=name))


FAMILY = Family(
    "GraniteMoeHybridForCausalLM",
    "granitemoehybrid",
    read,
    keys=granite.KEYS
    | {
        "mamba_conv_bias",
        "mamba_d_conv",
        "mamba_d_head",
        "mamba_d_state",
        "mamba_expand",
        "mamba_n_groups",
        "mamba_n_heads",
        "mamba_proj_bias",
        "num_experts_per_tok",
        "num_local_experts",
        "position_embedding_type",
        "shared_intermediate_size",
    },
    neutral={
        "normalization_function": ("rmsnorm",),
    }
    | mamba.NEUTRAL,
    inert=frozenset({"init_method", "mamba_chunk_size"}),
)
