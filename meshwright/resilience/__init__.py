"""Fault tolerance of a run: detects dead and hung ranks, replans for the rest, and keeps the state in memory."""
