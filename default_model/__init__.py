"""The embedded default model: a GGUF file out of a Python package, and as a Hugging Face folder."""
