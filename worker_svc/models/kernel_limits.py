"""The parts of a model's layers that kernels of ours do not compute, so that torch computes it."""

from collections.abc import Mapping

from worker_svc.models.spec import ModelSpec


def beyond_triton(spec: ModelSpec, num_ranks: int) -> str:
    """What Triton kernels on CUDA lack, in words; empty: nothing."""
    # A rank has the squares of its own heads alone.
    norms_over_ranks = spec.attention.norms_all_heads and num_ranks > 1
    return _named(
        {
            "states": spec.has_states,
            # Which of the two comes first would have to be known.
            "a factor on what they add, and norms of that": _scales_and_norms(spec),
            "gated attention": spec.attention.is_gated,
            "norms of all heads together, of several ranks": norms_over_ranks,
            "keys and values of latents": spec.attention.latent is not None,
        }
    )


def beyond_c(spec: ModelSpec) -> str:
    """What C kernels on a CPU lack, in words; empty: nothing."""
    return _named(
        {
            "states": spec.has_states,
            "a factor on what they add": spec.residual_scale != 1.0,
            "gated attention": spec.attention.is_gated,
            "norms of all heads together": spec.attention.norms_all_heads,
            "keys and values of latents": spec.attention.latent is not None,
            "groups of experts": spec.has_expert_groups,
            "heads that are rotated in part": spec.rotates_in_part,
        }
    )


def _scales_and_norms(spec: ModelSpec) -> bool:
    return spec.residual_scale != 1.0 and any(layer.norms_outputs for layer in spec.layers)


def _named(parts: Mapping[str, bool]) -> str:
    return " and ".join(name for name, is_there in parts.items() if is_there)
