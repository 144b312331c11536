"""The way of a request: from its fields to token ids, and from tokens to its outputs."""
