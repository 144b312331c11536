"""Weights stored in fewer bits than they are computed with: layouts and their reference."""
