"""Tools of POST /v1/responses: functions, custom tools and namespaces."""
