"""Calls that are not JSON as a whole, as model families write them."""
