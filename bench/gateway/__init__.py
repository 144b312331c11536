"""The cost of the gateway."""
