"""What the three services' gRPC servers have in common, and nothing of what they serve."""
