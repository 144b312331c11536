"""Weights that are stored in fewer bits: how they are read and, on CUDA, multiplied."""
