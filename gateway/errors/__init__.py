"""Errors that callers read: their kinds and texts, limits, and notices of fields without effect."""
