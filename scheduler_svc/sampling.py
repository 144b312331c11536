"""Sampling parameters as callers send them: checked, and every default filled in."""

import math
from dataclasses import dataclass

from pagewire.v1.types_pb2 import SamplingParams

MAX_STOP_TOKEN_IDS = 128


class BadSampling(ValueError):
    """A parameter out of range; the message names it."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """What the worker's sampler needs of a request."""

    temperature: float  # 0 is greedy
    top_p: float  # 1 is off
    top_k: int  # 0 is off
    min_p: float  # 0 is off
    seed: int


def resolve(params: SamplingParams, drawn_seed: int) -> Sampling:
    """Checks ranges and fills in defaults; `drawn_seed` is used when the caller gave none."""
    temperature = params.temperature if params.HasField("temperature") else 1.0
    top_p = params.top_p if params.HasField("top_p") else 1.0
    top_k = max(params.top_k, 0)
    problems = {
        f"temperature is {temperature}, must be from 0 to 2": not 0 <= temperature <= 2,
        f"top_p is {top_p}, must be above 0 and at most 1": not 0 < top_p <= 1,
        f"top_k is {params.top_k}, must be -1, 0 (both off) or more": params.top_k < -1,
        f"min_p is {params.min_p}, must be from 0 to 1": not 0 <= params.min_p <= 1,
        "max_tokens is 0, must be at least 1": params.HasField("max_tokens")
        and params.max_tokens == 0,
        f"stop_token_ids has {len(params.stop_token_ids)} ids, at most {MAX_STOP_TOKEN_IDS}": len(
            params.stop_token_ids
        )
        > MAX_STOP_TOKEN_IDS,
    }
    for problem, holds in problems.items():
        if holds:
            raise BadSampling(problem)
    seed = params.seed if params.HasField("seed") else drawn_seed
    if math.isclose(temperature, 0.0, abs_tol=1e-5):
        return Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=seed)
    return Sampling(temperature, top_p, top_k, params.min_p, seed)
