"""The paged KV cache, a step's batch, and the backends that attend."""
