"""Mesh axes: facts, derived groups, and what each does to a module."""
