"""What `pagewire up` is told, and by what."""
