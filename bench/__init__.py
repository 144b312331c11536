"""Measurements; each module on this level is a command."""
