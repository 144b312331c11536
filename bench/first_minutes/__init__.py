"""What a newcomer waits for: from a fresh clone, and from `pip install`, to the first answer."""
