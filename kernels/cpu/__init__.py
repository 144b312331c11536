"""Decoder operations on CPU, written in C; importing this compiles nothing."""
