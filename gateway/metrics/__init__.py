"""What this gateway counts of its requests: in cells, named when they are read."""
