"""How model families write calls that are not JSON as a whole."""
