"""Calls on a GPU: collectives and GEMM algorithms, timed by themselves."""
