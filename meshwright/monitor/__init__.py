"""Sinks, progress, drift and report: what a run shows while it runs and leaves behind."""
