"""Counts of this gateway's requests, and its part of their traces."""
