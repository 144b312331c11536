"""RMS norm, and the gated activation that can divide by it."""
