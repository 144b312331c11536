"""Families of models, a file each: what their config.json says, and what their checkpoints hold."""
