"""The page: static files, and the headers under which browsers may use them."""
