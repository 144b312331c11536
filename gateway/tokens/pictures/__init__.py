"""Reads pictures in a process that may die of them, and fetches those that are elsewhere."""
