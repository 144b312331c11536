"""Outputs that are chosen among more than are returned: beam search, and the best of several."""
