"""Who may do what on every port: TLS, API keys, peer tokens, roles. The same for all services."""
