"""gRPC server of the worker: step stream sessions, the worker service, the debug service."""
