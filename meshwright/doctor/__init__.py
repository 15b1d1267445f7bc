"""Checks of machines before a run: what a run and its recovery rely on, tried on each node and between nodes."""
