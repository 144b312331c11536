"""Benchmarks and pictures of the page."""
