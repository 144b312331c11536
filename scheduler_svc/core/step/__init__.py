"""One step: the plan, admission, reuse, and what its tokens change."""
