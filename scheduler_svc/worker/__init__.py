"""The link to one worker group: its stream, its signs of life, its pace, its state."""
