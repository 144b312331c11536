"""What a hostile or unlucky world does to running streams."""
