"""Products of low rank that rows of one batch add for adapters of their own (LoRA)."""
