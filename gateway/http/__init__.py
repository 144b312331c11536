"""The OpenAI-compatible HTTP API: converts JSON to and from the gateway's values."""
