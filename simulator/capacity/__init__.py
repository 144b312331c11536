"""Workloads, the virtual server that serves them, and the rate that meets an objective."""
