"""The OpenAI-compatible HTTP API: JSON in and out of the gateway's nouns."""
