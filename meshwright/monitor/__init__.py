"""Monitoring of a run: sinks of records and events, displays, progress of ranks, drift from the plan, report."""
