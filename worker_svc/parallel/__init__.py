"""Tensor parallelism: the group of ranks, peer memory, vocabulary parallelism."""
