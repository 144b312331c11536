"""LoRA adapters: their files, their weights in memory, and who of a step's rows has which."""
