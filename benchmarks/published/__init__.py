"""Predicts published training runs and says how far off it is."""
