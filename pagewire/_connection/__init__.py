"""Parts of a connection: settings of the environment, found tokens, and details of statuses."""
