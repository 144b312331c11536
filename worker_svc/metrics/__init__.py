"""What this worker counts: steps, and the time in which its device worked or waited."""
