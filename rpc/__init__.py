"""Wire formats and server setup shared by the three services."""
