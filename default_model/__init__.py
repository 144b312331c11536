"""The embedded default model: a GGUF file out of a Python package, as a Hugging Face folder."""
