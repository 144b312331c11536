"""Extras of asyncio gRPC servers: calls that may not end them, readers that do not read."""
