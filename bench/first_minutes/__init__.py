"""A newcomer's wait: from a fresh clone, and from `pip install`, to the first answer."""
