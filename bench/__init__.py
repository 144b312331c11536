"""What we measure; each module on this level is a command."""
