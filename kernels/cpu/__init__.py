"""The operations of a decoder on CPU, in C; importing this compiles nothing."""
