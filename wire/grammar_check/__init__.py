"""Checks grammars in processes that may die of them, so that gateway and worker never do."""
