"""What asyncio gRPC servers need besides: calls that may not end them, readers that do not read."""
