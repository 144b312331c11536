"""GPU kernels and their plain-PyTorch meaning, one file each; importing this costs nothing."""

# transformers takes this package for Hugging Face's `kernels` when it finds one; every version of
# it is content with 0.1.0, which it reads as "too old to use".
__version__ = "0.1.0"
