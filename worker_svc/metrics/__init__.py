"""Counts of this worker: steps, and the time in which its device worked or waited."""
