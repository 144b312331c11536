"""From an empty process to a worker that can serve: load, size, compile, warm up."""
