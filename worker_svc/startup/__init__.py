"""Start-up of a worker: loads the model, sizes the cache, compiles kernels, warms up."""
