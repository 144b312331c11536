"""`pagewire up`: the three services as processes of this machine."""
