"""Estimates of what comes: step times, waits, and the best worker group."""
