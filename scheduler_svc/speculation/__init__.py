"""Drafts for running requests, without a second model: from each request's own tokens."""
