"""A request and its sequences: what was asked, what is known, where its time went."""
