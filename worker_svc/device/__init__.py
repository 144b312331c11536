"""The device: selection, transfers, CUDA graph capture, timing."""
