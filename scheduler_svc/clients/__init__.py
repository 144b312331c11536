"""The streams of clients: what is on its way to each, and what each is told."""
