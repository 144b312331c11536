"""Tells routers which blocks the prefix caches hold, as readers of vLLM's events know it."""
