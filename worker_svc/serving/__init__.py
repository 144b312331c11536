"""The gRPC server: the step stream's session, the services, debugging."""
