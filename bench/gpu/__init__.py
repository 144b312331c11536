"""Parts of a worker on a GPU, timed by themselves."""
