"""The gRPC services: translates calls and statuses, decides nothing."""
