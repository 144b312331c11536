"""Sums and gathers over memory that every rank of a host can write."""
