"""Responses that are kept for later requests, in the memory of this process."""
