"""Tokenizers that are stored as the ranks of their tokens."""
