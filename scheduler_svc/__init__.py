"""The scheduler service: a pure core that decides everything, and the gRPC shell around it."""
