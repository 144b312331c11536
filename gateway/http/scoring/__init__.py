"""Routes that score documents by their relevance to a query."""
