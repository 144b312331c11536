"""The sampling rules that all services agree on."""

# Below this a temperature counts as 0: dividing by it would leave nothing but the maximum anyway.
GREEDY_TEMPERATURE = 1e-5

# Of a float32, as which numbers travel: a smaller one would arrive as 0.
SMALLEST_FLOAT = 1.2e-38
