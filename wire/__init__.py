"""The vocabulary of the wire: columns, grammars, log probabilities, state hashes, servers."""
