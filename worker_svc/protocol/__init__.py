"""The step protocol: its values, and the frames that carry them."""
