"""The last steps, and what they say about a request's time."""
