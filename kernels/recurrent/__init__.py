"""Recurrences in place of attention: what a sequence leaves is a state of fixed size."""
