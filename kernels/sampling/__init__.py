"""Sampling on the device: the state of each slot, and the choice of a token."""
