"""The stream that shows the running system, and the switch of its demo mode."""
