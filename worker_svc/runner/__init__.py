"""Runs steps: the state of the slots, model inputs, CUDA graphs, block moves."""
