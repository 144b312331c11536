"""What this scheduler counts outside its core: ends, steps, grants, refusals, tenants."""
