"""Requests that each server refuses before a handler: unreadable bytes, too large numbers."""
