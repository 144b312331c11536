"""Matrix products: our own kernels, and the library's by a named algorithm."""
