"""The scheduler service: a pure core that makes every decision, and the gRPC shell around it."""
