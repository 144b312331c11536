"""Work on what a client sent, in processes that may die of it: a fork for each piece of work."""
