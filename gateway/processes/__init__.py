"""Several gateways on one pair of ports."""
