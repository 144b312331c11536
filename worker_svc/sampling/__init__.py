"""Logits to tokens, and what is computed from prompts: grammars, log probabilities, embeddings."""
