"""Nemotron-H: each layer is Mamba-2, attention without rotation, an MLP or experts."""

from dataclasses import replace

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.config_keys import FULL_ATTENTION
from worker_svc.models.families import experts, mamba
from worker_svc.models.families.family import Family
from worker_svc.models.families.mamba import MAMBA, OLDER
from worker_svc.models.spec import (
    DIVIDED,
    Activation,
    AttentionSpec,
    LayerSpec,
    Mamba2Spec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    RouterSpec,
    TensorNames,
    UnsupportedModel,
)

MLP, MOE = "mlp", "moe"  # types of layers
PATTERN = {"M": MAMBA, "E": MOE, "*": FULL_ATTENTION, "-": MLP}
COUNTS = ("n_routed_experts", "num_local_experts")
# Where config.json has none:
KINDS = (MAMBA, MOE, FULL_ATTENTION, MLP)
EPS, HEAD_DIM = 1e-5, 128
MAMBA_HEADS, MAMBA_HEAD_DIM, GROUPS, STATE_SIZE, WIDTH = 128, 64, 8, 128, 4
EXPERTS, EXPERTS_PER_TOKEN, EXPERT_SIZE = 8, 2, 7688
NAMES = TensorNames(
    embedding="backbone.embeddings",
    layers="backbone.layers",
    final_norm="backbone.norm_f",
    input_norm="norm",
    attention="mixer",
    recurrent="mixer",
    mlp="mixer",
    shared_expert="shared_experts",
    divided={
        **DIVIDED,
        "embeddings.weight": 0,
        "in_proj.weight": 0,
        "conv1d.weight": 0,
        "conv1d.bias": 0,
        "mixer.A_log": 0,
        "mixer.D": 0,
        "mixer.dt_bias": 0,
        "mixer.norm.weight": 0,
        "out_proj.weight": 1,
    },
)


def read(config: ConfigJson) -> ModelSpec:
    kinds = _kinds(config)
    layers: dict[str, LayerSpec] = {
        MAMBA: LayerSpec(_mamba(config), None),
        FULL_ATTENTION: LayerSpec(_attention(config), None),
    }
    if MLP in kinds:
        size = config.positive("intermediate_size")
        layers[MLP] = LayerSpec(None, MlpSpec(size, activation=Activation.RELU2))
    if MOE in kinds:
        layers[MOE] = LayerSpec(None, _experts(config))
    return ModelSpec(
        architecture=config.architecture,
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        layers=tuple(layers[kind] for kind in kinds),
        ropes={},
        rms_norm_eps=_eps(config),
        max_position_embeddings=config.positive("max_position_embeddings"),
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        names=NAMES,
    )


def _kinds(config: ConfigJson) -> list[str]:
    """The type of each layer. Raises UnsupportedModel."""
    pattern = config.get("hybrid_override_pattern")
    listed = config.get("layers_block_type") or config.get("layer_types")
    if listed is None and pattern is not None:
        listed = [PATTERN.get(letter, letter) for letter in pattern]
    kinds = [OLDER.get(kind, kind) for kind in listed or KINDS]
    if strange := sorted({*kinds} - {*KINDS}):
        raise UnsupportedModel(f"layers_block_type: {strange[0]!r} is not supported")
    for needed in (MAMBA, FULL_ATTENTION):
        if needed not in kinds:
            raise UnsupportedModel(f"layers_block_type: no layer is {needed!r}")
    if config.positive("num_hidden_layers", len(kinds)) != len(kinds):
        raise UnsupportedModel(
            f"num_hidden_layers: {len(kinds)} types of layers for "
            f"{config.get('num_hidden_layers')} layers"
        )
    return kinds


def _eps(config: ConfigJson) -> float:
    return config.above_zero("layer_norm_epsilon", EPS)


def _attention(config: ConfigJson) -> AttentionSpec:
    config = replace(config, values={"head_dim": HEAD_DIM, **config.values})
    config.required("num_key_value_heads")
    return AttentionSpec(*config.heads(), rope=None)


def _mamba(config: ConfigJson) -> Mamba2Spec:
    return Mamba2Spec(
        num_heads=config.positive("mamba_num_heads", MAMBA_HEADS),
        head_dim=config.positive("mamba_head_dim", MAMBA_HEAD_DIM),
        num_groups=config.positive("n_groups", GROUPS),
        state_size=config.positive("ssm_state_size", STATE_SIZE),
        width=config.positive("conv_kernel", WIDTH),
        norm_eps=_eps(config),
        conv_bias=config.flag("use_conv_bias", True),
    )


def _experts(config: ConfigJson) -> MoeSpec:
    """The experts of a layer. Raises UnsupportedModel."""
    for name in ("n_group", "topk_group"):
        if config.positive(name, 1) > 1:
            raise UnsupportedModel(f"{name}: groups of experts are not supported, only 1 is")
    router = RouterSpec(
        *experts.counts(config, EXPERTS, EXPERTS_PER_TOKEN, COUNTS),
        renormalizes=config.flag("norm_topk_prob", True),
        is_sigmoid=True,
        has_bias=True,
        scale=config.above_zero("routed_scaling_factor", 1.0),
    )
    size = config.positive("moe_intermediate_size", EXPERT_SIZE)
    name = "moe_shared_expert_intermediate_size"
    shared_size = config.positive(name, EXPERT_SIZE)
    shared = experts.shared(shared_size, size, is_gated=False, name=name)
    return MoeSpec(router, size, shared, activation=Activation.RELU2)


FAMILY = Family(
    "NemotronHForCausalLM",
    "nemotron_h",
    read,
    keys=frozenset(COUNTS)
    | {
        "conv_kernel",
        "hybrid_override_pattern",
        "layer_norm_epsilon",
        "layers_block_type",
        "mamba_head_dim",
        "mamba_num_heads",
        "moe_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "n_group",
        "n_groups",
        "norm_topk_prob",
        "num_experts_per_tok",
        "routed_scaling_factor",
        "ssm_state_size",
        "topk_group",
        "use_conv_bias",
    },
    neutral={
        "mamba_hidden_act": ("silu",),
        "mamba_proj_bias": (False,),
        "mamba_ssm_cache_dtype": ("float32",),
        "mlp_hidden_act": ("relu2",),
        "moe_latent_size": (),
        "n_shared_experts": (1,),
        "residual_in_fp32": (False,),
    }
    | mamba.NEUTRAL,
    # How it is computed, how weights were drawn, second names of numbers that other keys have, and
    # what drafts alone read.
    inert=frozenset(
        {
            "auto_map",
            "chunk_size",
            "expand",
            "moe_shared_expert_overlap",
            "mtp_hybrid_override_pattern",
            "mtp_layers_block_type",
            "norm_eps",
            "num_logits_to_keep",
            "rescale_prenorm_residual",
            "time_step_floor",
            "time_step_max",
            "time_step_min",
            "use_mamba_kernels",
        }
    ),
)
