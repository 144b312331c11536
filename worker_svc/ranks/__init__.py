"""Processes of a tensor-parallel group: the supervisor, rank 0 and its followers."""
