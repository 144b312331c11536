"""Beam search: several continuations of one prompt, of which the likeliest are kept."""
