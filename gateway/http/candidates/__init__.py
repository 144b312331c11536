"""Fields of bodies that say how many outputs are computed, and which of them are returned."""
