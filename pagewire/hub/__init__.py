"""Models by name: ORG/NAME[@revision] of a model hub becomes a folder on this machine."""
