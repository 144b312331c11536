"""Traces of the past: ended requests, worker losses, migration, output lengths."""
