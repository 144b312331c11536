"""KV blocks: the pool, the prefix cache, host blocks, and the slots that hold them."""
