"""RMS norm, and SiLU-and-mul, which can divide by the RMS."""
