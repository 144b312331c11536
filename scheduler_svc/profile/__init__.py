"""ProfileSteps: what scheduler and workers did in the same steps, on one clock."""
