"""What a worker process is made of: threads, pipes, heartbeats, exit codes, ordered faults."""
