"""Blocks that come from other workers, and those that others read here."""
