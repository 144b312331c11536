"""`pagewire bench`: a load on a server, and what came back."""
