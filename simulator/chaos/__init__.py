"""The production scheduler under virtual time, among failing workers and a lossy network."""
