"""Metrics of every service: numbers in plain cells, written as Prometheus text when they are read.

What is measured is declared where it happens, in each service's own `metrics` room.
"""
