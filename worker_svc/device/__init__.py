"""The device: its kind and type, copies to and from it, graph capture, clocks."""
