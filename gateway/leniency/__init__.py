"""What a request is accepted with although it has no effect, and how its caller hears of it."""
