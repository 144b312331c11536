"""What the sampler draws from, in float64; it knows nothing of candidates, buckets or races."""

import numpy as np
from numpy.typing import NDArray


def reference_distribution(
    logits: NDArray[np.float64], temperature: float, top_k: int, top_p: float, min_p: float
) -> NDArray[np.float64]:
    """Temperature, min-p, top-k, top-p, one after the other."""
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
