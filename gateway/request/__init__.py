"""A request as data: what is generated or embedded, and with which settings."""
