"""The bytes that a decode step moves at the least: weights, keys and values, recurrent states.

Every weight that a step needs is read once, and of experts those that uniform routing would choose;
each row reads the keys and values of its context, and reads and writes its states.
"""

from dataclasses import dataclass

import torch

from worker_svc.models.spec import (
    AttentionSpec,
    DeltaNetSpec,
    Feed,
    Mamba2Spec,
    MlpAndExpertsSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    RecurrentSpec,
    ShortConvSpec,
)
from worker_svc.quantization.mxfp4 import Mxfp4
from worker_svc.states.slots import row_bytes

MXFP4_BYTES = 17 / 32  # of a number: 4 bits, and a scale for 32


@dataclass(frozen=True, slots=True)
class Formats:
    """Bytes of a number."""

    linear: float = 2.0  # of a layer's products
    experts: float = 2.0
    head: float = 2.0
    cache: float = 2.0

    @classmethod
    def of(cls, spec: ModelSpec, quantization: str) -> "Formats":
        """The formats of a bfloat16 checkpoint that a worker loads with this option."""
        linear = {"auto": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5 + 2 / 128}[quantization]
        experts = MXFP4_BYTES if isinstance(spec.quantization, Mxfp4) else linear
        return cls(linear, experts)


@dataclass(frozen=True, slots=True)
class StepBytes:
    """The bytes that a step moves."""

    weights: float
    cache: float
    states: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.cache + self.states


def step_bytes(spec: ModelSpec, rows: int, context: int, formats: Formats) -> StepBytes:
    """The bytes of a decode step of so many rows at this context, on one device."""
    weights = spec.vocab_size * spec.hidden_size * formats.head
    for layer in spec.layers:
        weights += _mixer_numbers(layer.mixer, spec.hidden_size) * formats.linear
        weights += _feed_bytes(layer.feed, spec.hidden_size, rows, formats)
    if spec.layer_inputs is not None:  # a product for all layers, and two in each
        through = spec.num_layers * spec.layer_inputs.size
        weights += 3 * spec.hidden_size * through * formats.linear
    seen = (min(context, attention.window or context) for attention in spec.attentions)
    numbers = sum(
        tokens * attention.kv_shape.width
        for tokens, attention in zip(seen, spec.attentions, strict=True)
    )
    states = 2 * row_bytes(spec.states(torch.bfloat16))
    return StepBytes(weights, rows * numbers * formats.cache, float(rows * states))


def _mixer_numbers(mixer: AttentionSpec | RecurrentSpec | None, hidden: int) -> int:
    """Weights of a layer's mixer, but for vectors."""
    match mixer:
        case AttentionSpec(latent=None):
            queries, keys = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
            num_keys = 0 if mixer.shares_kv else 2 - mixer.v_is_k
            return hidden * ((2 + mixer.is_gated) * queries + num_keys * keys)
        case AttentionSpec():
            return _latent_numbers(mixer, hidden)
        case DeltaNetSpec():
            inner, heads = mixer.num_value_heads * mixer.value_dim, mixer.num_value_heads
            channels = sum(mixer.sections)
            return hidden * (channels + 2 * inner + 2 * heads) + channels * mixer.width
        case Mamba2Spec():
            inner, channels = mixer.inner_size, mixer.num_channels
            return hidden * (2 * inner + channels + mixer.num_heads) + channels * mixer.width
        case ShortConvSpec():
            return 4 * hidden * mixer.channels + mixer.channels * mixer.width
        case None:
            return 0


def _latent_numbers(mixer: AttentionSpec, hidden: int) -> int:
    latent, heads = mixer.latent, mixer.num_heads
    assert latent is not None
    query = latent.nope_dim + latent.rope_dim
    through = latent.query_size
    queries = hidden * heads * query if through is None else through * (hidden + heads * query)
    keys = hidden * (latent.size + latent.rope_dim)
    return (
        queries
        + keys
        + heads * (latent.size * (latent.nope_dim + latent.v_dim))
        + (heads * latent.v_dim * hidden)
    )


def _feed_bytes(feed: Feed | None, hidden: int, rows: int, formats: Formats) -> float:
    match feed:
        case MlpSpec():
            return _mlp_numbers(feed, hidden) * formats.linear
        case MoeSpec():
            return _expert_bytes(feed, hidden, rows, formats)
        case MlpAndExpertsSpec(mlp, experts):
            of_mlp = _mlp_numbers(mlp, hidden) * formats.linear
            return of_mlp + _expert_bytes(experts, hidden, rows, formats)
        case None:
            return 0.0


def _mlp_numbers(feed: MlpSpec, hidden: int) -> int:
    return (2 + feed.activation.has_gate) * hidden * feed.intermediate_size


def _expert_bytes(feed: MoeSpec, hidden: int, rows: int, formats: Formats) -> float:
    """Bytes of the router, in float numbers, and of the experts that so many rows choose."""
    count, chosen = feed.router.num_experts, feed.router.top_k
    read = count * (1 - (1 - chosen / count) ** rows)
    read += 0 if feed.shared is None else feed.shared.count
    one = (2 + feed.activation.has_gate) * hidden * feed.intermediate_size
    return count * hidden * formats.head + read * one * formats.experts
