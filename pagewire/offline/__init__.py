"""The engine inside one program: services of its own, for as long as it runs."""
