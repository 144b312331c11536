"""States of sequences besides keys and values: their memory, and the order of their updates."""
