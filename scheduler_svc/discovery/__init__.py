"""Worker groups are found by name (DNS), by registration, and by what operators say."""
