"""Records of requests and steps, made on request: spans, and where a step's time goes."""
