"""Counts of this scheduler outside its core: ends, steps, grants, refusals, tenants."""
