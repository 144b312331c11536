"""Workers without a model, for the scheduler's tests, benchmarks and capacity questions."""
