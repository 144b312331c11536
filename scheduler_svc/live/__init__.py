"""The scheduler at work, for those who watch."""
