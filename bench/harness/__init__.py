"""Common parts of benchmarks: services on free ports, checkpoints, workloads, results."""
