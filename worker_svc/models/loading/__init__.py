"""Reads weights that are not stored as the model computes with them."""
