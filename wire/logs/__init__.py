"""Every service writes its log as text or JSON, with the request that a line is about."""
