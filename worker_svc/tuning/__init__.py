"""Measures attention backends and GEMM algorithms at start-up, and chooses."""
