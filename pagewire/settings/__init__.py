"""What users may set, read the same way by `pagewire up` and by each service."""
