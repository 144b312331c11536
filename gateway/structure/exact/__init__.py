"""Grammars of schemas whose numbers the grammar library would round."""
