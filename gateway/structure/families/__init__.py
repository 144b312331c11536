"""The forms in which model families write calls, as rules of grammars."""
