"""Experiment trackers: a file each, found by name or by the entry-point group ``meshwright.trackers``."""
