"""The options of `pagewire up`, and where they come from."""
