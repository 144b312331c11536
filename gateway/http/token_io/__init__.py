"""Token ids in, token ids out: for routers that keep the text of a request elsewhere."""
