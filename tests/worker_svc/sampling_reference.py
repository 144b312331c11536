"""The sampler's distribution in float64, by the definition, without candidates or noise."""

import numpy as np
from numpy.typing import NDArray


def reference_distribution(
    logits: NDArray[np.float64], temperature: float, top_k: int, top_p: float, min_p: float
) -> NDArray[np.float64]:
    """Applies temperature, min-p, top-k, top-p in this order."""
    scaled = logits / temperature
    weights = np.exp(scaled - scaled.max())
    keep = weights >= min_p
    if top_k:
        keep &= scaled >= np.sort(scaled)[::-1][min(top_k, len(scaled)) - 1]
    weights = np.where(keep, weights, 0)
    weights /= weights.sum()
    if top_p < 1:
        order = np.argsort(-weights, kind="stable")
        reached = np.searchsorted(np.cumsum(weights[order]), top_p)
        weights[order[reached + 1 :]] = 0
    return weights / weights.sum()
