"""The stream to the scheduler: live requests, readiness, conversions."""
