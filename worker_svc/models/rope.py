"""Rotary position embedding: builds cos/sin tables with the checkpoint's scaling.

The kernels read one row per position and apply it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.attention.rope_tables import RopeTables


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Divides all positions by the factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Divides low frequencies by the factor, keeps high ones, and interpolates in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: divides the frequencies by dimension, by turns within the original length."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class FactorScaling:
    """Divides the frequency of each pair of dimensions by a factor of its own."""

    factors: tuple[float, ...]  # [head_dim / 2]


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE: a factor for each pair of dimensions, from one of two sets.

    One set serves contexts up to the original length, the other longer ones. Keys stay in the cache
    as they were rotated, so a model that is served with longer contexts uses that set for all.
    """

    short_factor: tuple[float, ...]  # [head_dim / 2]
    long_factor: tuple[float, ...]  # [head_dim / 2]
    original_max_position_embeddings: int
    factor: float
    attention_factor: float | None = None

    def factors(self, length: int) -> tuple[float, ...]:
        """The factors of a model that is served with contexts of up to this length."""
        return self.long_factor if self.is_long(length) else self.short_factor

    def is_long(self, length: int) -> bool:
        """True if contexts of this length are beyond the original one."""
        return length > self.original_max_position_embeddings


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """NTK scaling by the length so far; up to the model's own length, which is the most, none.

    Beyond it each key would depend on how long the context was when it was computed.
    """

    factor: float


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """Turns a part of a head's pairs, the first ones, by the frequencies of the whole head."""

    part: float  # of the pairs


Scaling = (
    LinearScaling
    | Llama3Scaling
    | YarnScaling
    | FactorScaling
    | LongRopeScaling
    | DynamicScaling
    | ProportionalScaling
)


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """Base of the frequencies, optional scaling, and the part of each head that is rotated."""

    theta: float
    scaling: Scaling | None = None
    part: float = 1.0  # of the head's dimensions, the first ones

    def size(self, head_dim: int) -> int:
        """The number of dimensions that are rotated, of a head of so many."""
        return int(head_dim * self.part)


def rope_tables(
    ropes: Mapping[str, RotaryConfig],
    of_layers: Sequence[tuple[str | None, int]],
    length: int,
    device: torch.device,
) -> RopeTables:
    """Tables for layers that rotate by these names, or not at all: None, heads of these sizes."""
    kinds = list(dict.fromkeys(of_layers))
    tables = (
        _no_rotation(head_dim, length)
        if name is None
        else cos_sin_table(ropes[name], ropes[name].size(head_dim), length)
        for name, head_dim in kinds
    )
    of_layer = tuple(kinds.index(kind) for kind in of_layers)
    return RopeTables(tuple(table.to(device) for table in tables), of_layer)


def _no_rotation(head_dim: int, length: int) -> Tensor:
    """A table that leaves queries and keys as they are, so that all layers run the same code."""
    return torch.cat((torch.ones(length, head_dim // 2), torch.zeros(length, head_dim // 2)), dim=1)


def cos_sin_table(config: RotaryConfig, head_dim: int, length: int) -> Tensor:
    """[length, head_dim] float32: head_dim / 2 cosines, then head_dim / 2 sines, per position."""
    angles = torch.outer(torch.arange(length).float(), frequencies(config, head_dim, length))
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return table * attention_factor(config.scaling)


def frequencies(config: RotaryConfig, head_dim: int, length: int) -> Tensor:
    """Angle per position of each pair of dimensions, in radians, [head_dim / 2].

    `length` is that of the longest context that is served.
    """
    exponents = torch.arange(0, head_dim, 2).float() / head_dim
    plain = 1.0 / config.theta**exponents
    match config.scaling:
        case None | DynamicScaling():
            return plain
        case LinearScaling(factor):
            return plain / factor
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling)
        case YarnScaling() as scaling:
            return _yarn(plain, scaling, config.theta)
        case FactorScaling(factors):
            return plain / torch.tensor(factors)
        case LongRopeScaling() as scaling:
            return plain / torch.tensor(scaling.factors(length))
        case ProportionalScaling(part):
            plain[int(part * head_dim // 2) :] = 0.0
            return plain


def attention_factor(scaling: Scaling | None) -> float:
    """Factor on q and k after the rotation; 1 except for YaRN and LongRoPE."""
    if not isinstance(scaling, YarnScaling | LongRopeScaling):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if isinstance(scaling, LongRopeScaling):
        if scaling.factor <= 1:
            return 1.0
        original = scaling.original_max_position_embeddings
        return math.sqrt(1 + math.log(scaling.factor) / math.log(original))
    if scaling.mscale and scaling.mscale_all_dim:
        over, under = scaling.mscale, scaling.mscale_all_dim
        return _softening(scaling.factor, over) / _softening(scaling.factor, under)
    return _softening(scaling.factor, 1.0)


def latent_factor(scaling: Scaling | None) -> float:
    """Factor on the scores of attention over latents; 1 but for YaRN with `mscale_all_dim`."""
    if not isinstance(scaling, YarnScaling) or not scaling.mscale_all_dim:
        return 1.0
    return _softening(scaling.factor, scaling.mscale_all_dim) ** 2


def _softening(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # 1: unscaled, 0: scaled
    return kept * plain + (1 - kept) * plain / scaling.factor


def _yarn(plain: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    num_pairs = plain.shape[0]

    def pair_turning(turns: float) -> float:
        """The (fractional) pair that makes this number of turns within the original length."""
        length = scaling.original_max_position_embeddings
        return num_pairs * math.log(length / (turns * 2 * math.pi)) / math.log(theta)

    first, last = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    width = (last - first) or 0.001  # avoids a division by 0
    stretched = ((torch.arange(num_pairs).float() - first) / width).clamp(0, 1)
    return (1 - stretched) * plain + stretched * plain / scaling.factor
