"""Settings of users, read the same way by `pagewire up` and by each service."""
