"""The error of an adapter that cannot be served."""


class BadAdapter(ValueError):
    """An adapter cannot be read, or not be served over this model; the message names the cause."""
