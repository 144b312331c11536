"""The processes of a tensor-parallel group: supervisor, ranks, followers."""
