"""Quantized checkpoints: what their settings mean, and the weights that their tensors hold.

Knows tensors of linear layers by name, shape and type; not the model they belong to.
"""
