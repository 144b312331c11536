"""The gateway: serves text APIs. It converts text to token ids and back and makes no decisions."""
