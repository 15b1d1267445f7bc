"""Reads and builds models: names to modules on meta, any part of any weight, structure, shape, export."""
