# mypy: disable-error-code="untyped-decorator"
"""Gumbel noise inside kernels.

    seed, output position -> noise_key;  noise_key, token ids -> gumbel_noise

Bitwise equal to `worker_svc.sampling.random_numbers`: a pure function, whichever part of the
vocabulary a program reads.
"""

import triton
import triton.language as tl


@triton.jit
def noise_key(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """`worker_svc.sampling.random_numbers.noise_keys` for one row, bitwise equal."""
    gamma = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    return _mix(_mix(seed.to(tl.uint64) + gamma) + (position + 1).to(tl.uint64) * gamma)


@triton.jit
def gumbel_noise(row_key: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """`worker_svc.sampling.random_numbers.gumbel_noise` for one row, by the same formula."""
    bits = ids.to(tl.uint32) * tl.full([], 0x9E3779B1, tl.uint32) + row_key.to(tl.uint32)
    bits = (bits ^ (bits >> 16)) * tl.full([], 0x85EBCA6B, tl.uint32)
    bits = bits ^ (row_key >> 32).to(tl.uint32)
    bits = (bits ^ (bits >> 13)) * tl.full([], 0xC2B2AE35, tl.uint32)
    bits = bits ^ (bits >> 16)
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@triton.jit
def _mix(value: tl.tensor) -> tl.tensor:
    value = (value ^ (value >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    value = (value ^ (value >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return value ^ (value >> 31)
