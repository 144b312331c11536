"""Parts of a worker process: threads, pipes, heartbeats, exit codes, fault injection."""
