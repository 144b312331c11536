"""vLLM's `/pooling` and `/classify`."""
