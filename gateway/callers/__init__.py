"""Callers: who they are, what each of them may take, and whose turn it is."""
