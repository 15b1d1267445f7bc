"""Reads and builds models: names to modules on meta, any part of any weight, anatomy, shape, export."""
