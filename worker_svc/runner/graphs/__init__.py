"""CUDA graphs of whole steps, and how a step is laid out for them."""
