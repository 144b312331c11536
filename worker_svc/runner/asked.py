"""Sampling wishes of the sequences in some slots, from the host's columns of SLOT."""

import numpy as np
from numpy.typing import NDArray

from worker_svc.protocol.step import IntColumn
from worker_svc.sampling.sampler import is_filtered


def are_plain(columns: NDArray[np.void], slots: IntColumn) -> bool:
    """True if they want no logits changed and none reported."""
    if columns["has_processors"][slots].any() or columns["has_logprobs"][slots].any():
        return False
    if not columns["min_tokens"][slots].any():
        return True
    num_output = columns["num_tokens"][slots] - columns["num_prompt"][slots]
    return not (num_output < columns["min_tokens"][slots]).any()


def may_filter(columns: NDArray[np.void], slots: IntColumn) -> bool:
    """True if any of them filters what it samples from."""
    names = ("temperature", "top_k", "top_p", "min_p")
    temperature, top_k, top_p, min_p = (columns[name][slots] for name in names)
    return bool(is_filtered(temperature, top_k, top_p, min_p).any())
