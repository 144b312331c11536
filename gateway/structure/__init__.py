"""Forms that an output must have: JSON schemas, and the grammars made of them."""
