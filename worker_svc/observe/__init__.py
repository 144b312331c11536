"""What the worker tells of requests and steps on request: spans, and where a step's time goes."""
