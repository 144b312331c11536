"""What an output must look like: JSON schemas, and the grammars made of them."""
