"""Tokens to text: detokenizer, stop strings, log probabilities, what is said of the prompt."""
