"""Records of requests and steps as they pass: spans, a line for each step."""
