"""Arrivals through the services: first tokens, pauses and rates as clients see them."""
