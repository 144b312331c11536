"""The same work by other engines."""
