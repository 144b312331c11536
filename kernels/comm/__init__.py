"""All-reduce and all-gather over memory that every rank of a host can write."""
