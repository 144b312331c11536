"""What benchmarks share: services on free ports, checkpoints, workloads, results."""
