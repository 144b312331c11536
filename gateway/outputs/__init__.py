"""Outputs of one request: several at once, or chosen among more than are returned."""
