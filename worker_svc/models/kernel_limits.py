"""The parts of a model's layers that kernels of ours do not compute, so that torch computes it."""

from collections.abc import Mapping

from worker_svc.models.spec import MlpAndExpertsSpec, ModelSpec


def beyond_triton(spec: ModelSpec, num_ranks: int) -> str:
    """The parts that Triton kernels on CUDA lack, in words; empty: none."""
    # A rank has the squares of its own heads alone.
    norms_over_ranks = _norms_all_heads(spec) and num_ranks > 1
    return _named(
        {
            **_beyond_both(spec),
            # Which of the two comes first would have to be known.
            "a factor on what they add, and norms of that": _scales_and_norms(spec),
            "norms of all heads together, of several ranks": norms_over_ranks,
        }
    )


def beyond_c(spec: ModelSpec) -> str:
    """The parts that C kernels on a CPU lack, in words; empty: none."""
    return _named(
        {
            **_beyond_both(spec),
            "a factor on what they add": spec.residual_scale != 1.0,
            "norms of all heads together": _norms_all_heads(spec),
            "groups of experts": spec.has_expert_groups,
            "heads that are rotated in part": spec.rotates_in_part,
        }
    )


def beyond_composed(spec: ModelSpec) -> str:
    """The parts that torch between Triton kernels lacks, in words; empty: none."""
    return _named(_beyond_all(spec))


def _beyond_both(spec: ModelSpec) -> Mapping[str, bool]:
    return {
        "states": spec.has_states,
        **_beyond_all(spec),
        "gated attention": any(mixer.is_gated for mixer in spec.attentions),
        "keys and values of latents": spec.has_latents,
    }


def _beyond_all(spec: ModelSpec) -> Mapping[str, bool]:
    return {
        "attention of several shapes": not spec.has_one_attention,
        "norms of values": any(mixer.v_norm for mixer in spec.attentions),
        "an MLP and experts in one layer": any(
            isinstance(layer.feed, MlpAndExpertsSpec) for layer in spec.layers
        ),
        "factors after layers": any(layer.has_factor for layer in spec.layers),
        "inputs of layers": spec.layer_inputs is not None,
    }


def _norms_all_heads(spec: ModelSpec) -> bool:
    return any(mixer.norms_all_heads for mixer in spec.attentions)


def _scales_and_norms(spec: ModelSpec) -> bool:
    return spec.residual_scale != 1.0 and any(layer.norms_outputs for layer in spec.layers)


def _named(parts: Mapping[str, bool]) -> str:
    return " and ".join(name for name, is_there in parts.items() if is_there)
