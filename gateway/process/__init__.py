"""The process of a gateway: its settings, its servers, and several of them on one pair of ports."""
