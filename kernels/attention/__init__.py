"""Attention over a paged KV cache, and what fills the cache."""
