"""Tensor parallelism: the group of ranks, their shared memory, their parts of the vocabulary."""
