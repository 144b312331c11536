"""GPU and CPU kernels, with their definitions in plain PyTorch; importing this loads nothing."""

# transformers mistakes this package for Hugging Face's `kernels`; all its versions ignore 0.1.0 as
# too old to use.
__version__ = "0.1.0"
