"""Any causal language model that transformers has a class for, over the worker's paged cache."""
