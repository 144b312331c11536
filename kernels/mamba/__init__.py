"""Convolutions and state space layers: what a sequence leaves is a state of fixed size."""
