"""Workers without a model: slots, blocks and tokens as a real one would keep them."""
