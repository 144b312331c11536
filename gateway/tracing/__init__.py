"""The gateway's part of a request's trace."""
