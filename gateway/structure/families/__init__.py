"""How model families write calls, as rules of grammars."""
