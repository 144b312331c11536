"""Routes that generate nothing."""
