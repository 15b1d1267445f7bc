"""Hostile files and peers: `make fuzz`."""
