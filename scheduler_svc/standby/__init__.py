"""A scheduler that waits until no other one has the workers."""
