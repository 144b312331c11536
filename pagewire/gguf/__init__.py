"""GGUF files: a model's configuration, tokenizer and weights in one file.

Everything but the weights needs the standard library alone, so that the gateway, the worker and the
command read a file in the same way.
"""
