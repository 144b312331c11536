"""Limits at the gateway's ports: what one client or one connection may cost before it is known."""
