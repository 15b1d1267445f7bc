"""Measures this machine: the times of operators, collectives and the host that make a calibration."""
