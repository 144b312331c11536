"""The worker service: holds the model and turns each SchedulerOutput into sampled tokens."""
