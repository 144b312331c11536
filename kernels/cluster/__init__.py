"""Kernels whose thread blocks form clusters: CUDA C, compiled at run time."""
