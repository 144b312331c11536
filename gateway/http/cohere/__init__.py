"""The second version of Cohere's API: `/v2/embed` and `/v2/chat`."""
