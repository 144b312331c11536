"""GEMM: own Triton kernels for few rows, and cuBLASLt with an explicit algorithm."""
