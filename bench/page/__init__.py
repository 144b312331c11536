"""The pictures of the page."""
